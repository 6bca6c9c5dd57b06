"""Package path of NeMo Automodel's scripts."""
