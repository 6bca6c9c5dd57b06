"""Files on disk: checkpoints that any layout loads, and plain Hugging Face directories."""
