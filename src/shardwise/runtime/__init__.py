"""What split modules do in their forward: linears, embeddings, norms, and the edges of the regions between them."""
