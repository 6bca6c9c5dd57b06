"""Storage of one tensor on the ranks of a mesh, as boxes of integers. Arithmetic only."""
