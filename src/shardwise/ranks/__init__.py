"""Ranks on this machine's CPU, for proofs and tests: starts processes, runs a function, returns the results."""
