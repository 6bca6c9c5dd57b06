"""What split modules do in their forward: linears, embeddings, norms, regions, stages of a pipeline, the loss."""
