"""Runs pipeline parallelism: stages in a schedule's order, forward, backward and generation."""
