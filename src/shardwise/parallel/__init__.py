"""Applies a plan to a live model: reads facts, decides the split, and edits the model for each kind of parallelism."""
