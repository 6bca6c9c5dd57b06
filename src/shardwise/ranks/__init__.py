"""Helpers for testing code that runs on several ranks: see `shardwise.ranks.spawn`."""
