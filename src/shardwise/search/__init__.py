"""Derives plans: runs a tiny model to find out how the model can be split."""
