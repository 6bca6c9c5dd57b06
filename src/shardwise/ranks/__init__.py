"""Ranks on this machine's CPU, for proofs and tests: started, given a function, asked for what it returned."""
