"""What the measurements in `bench/` share: starting ranks, and reporting ratios."""
