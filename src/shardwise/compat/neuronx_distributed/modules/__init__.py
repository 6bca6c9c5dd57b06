"""NxD's `modules`."""
