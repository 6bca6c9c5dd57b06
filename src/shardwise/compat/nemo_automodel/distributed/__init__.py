"""The path that scripts import from."""
