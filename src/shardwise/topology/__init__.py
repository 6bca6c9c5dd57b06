"""Mesh shapes: axes, sizes, and coordinates of ranks. Arithmetic only."""
