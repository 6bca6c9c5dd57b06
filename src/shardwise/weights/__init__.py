"""Weights on disk: read exactly the bytes a rank owns, write plain Hugging Face safetensors."""
