"""The functions after the front door: the one room that composes planning, splitting, loading and proving."""
