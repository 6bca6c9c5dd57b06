"""Parallel layers for models written by hand: linears, embeddings, padded heads."""
