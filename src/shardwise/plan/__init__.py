"""Plans: which style splits which module or parameter, and why."""
