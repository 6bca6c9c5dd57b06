"""Tests of code that runs on several ranks: `shardwise.testing.spawn`, the public interface of `ranks`."""
