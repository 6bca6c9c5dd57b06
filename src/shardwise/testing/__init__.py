"""For tests of code that runs on several ranks: `shardwise.testing.spawn`, the public door of `ranks`."""
