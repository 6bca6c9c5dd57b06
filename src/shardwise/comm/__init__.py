"""Communication: collectives as pairs of autograd functions on plain tensors."""
