"""How one tensor lies on the ranks of a mesh, as boxes of integers. Arithmetic only."""
