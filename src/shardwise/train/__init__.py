"""Training: the step, the optimizer, clipping, random numbers, the loop and its data."""
