"""Proof that a split model computes what the unsplit one does."""
