"""Weights on disk: reads exactly a rank's bytes, writes plain Hugging Face safetensors."""
