"""Tiny models of any architecture, and their inputs."""
