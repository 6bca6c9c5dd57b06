"""Helpers for testing code that runs on several ranks: see `shardwise.testing.spawn`."""
