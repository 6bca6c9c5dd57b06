"""What `bench/gpu.py` is made of: contenders on one card, each in a process of its own."""
