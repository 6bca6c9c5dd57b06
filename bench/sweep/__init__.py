"""What `bench/architectures.py` is made of: the cases of a sweep, and the tables that say what it found."""
