"""What split modules do in their forward: linears, embeddings, norms, regions, the vocabulary loss."""
