"""Training: one step for every layout, the loop around it, and the configuration of a run."""
