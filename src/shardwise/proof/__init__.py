"""Proves that a split model computes the same as the unsplit one."""
