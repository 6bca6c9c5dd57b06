"""How one tensor is stored on the ranks of a mesh, as boxes of integers. Arithmetic only."""
