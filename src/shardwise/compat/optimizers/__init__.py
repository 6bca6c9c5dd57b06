"""Optimizers of the other systems: moved to split parameters, averaging and clipping by themselves, ZeRO-1."""
