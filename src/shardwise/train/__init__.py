"""Training: one step for every layout, the loop around it, and what a run is asked to do."""
