"""`spawn`: a function on several CPU ranks, their results in rank order, the first rank's error raised."""

from shardwise.errors import RankError
from shardwise.ranks.spawn import spawn

__all__ = ["RankError", "spawn"]
