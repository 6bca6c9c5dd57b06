"""The functions behind the front door: the one room that composes planning, splitting, loading and proving."""
