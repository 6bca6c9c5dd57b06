"""NxD's `utils`."""
