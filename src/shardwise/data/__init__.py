"""Training data: from text and records to rows of tokens, and to each rank's batches."""
