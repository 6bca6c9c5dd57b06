"""Applying a plan to a live model: facts, the spine of steps, and what each kind of parallelism edits."""
