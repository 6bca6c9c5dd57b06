"""Cost of a layout, computed without torch: bytes per rank, and stages of equal cost."""
