"""Tiny models of any architecture, with what they are given."""
