"""Losses of split models: logits split over the vocabulary, and logits that are never materialized."""
