"""Implements the public functions: composes planning, splitting, loading and proving."""
