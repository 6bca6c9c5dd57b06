"""Communication: collectives as autograd pairs on plain tensors."""
