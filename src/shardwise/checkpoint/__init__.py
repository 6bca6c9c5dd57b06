"""What is written to disk: plain Hugging Face directories."""
