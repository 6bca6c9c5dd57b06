"""`spawn`: runs a function on several CPU ranks."""

from shardwise.errors import RankError
from shardwise.ranks.spawn import spawn

__all__ = ["RankError", "spawn"]
