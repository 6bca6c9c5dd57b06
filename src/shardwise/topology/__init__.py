"""Mesh shapes: axes, sizes, and which rank sits where. Arithmetic only."""
