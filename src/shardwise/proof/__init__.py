"""Proof that a split model computes what the whole one does."""
