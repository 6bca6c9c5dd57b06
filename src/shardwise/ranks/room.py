"""Whether this machine can hold so many ranks: thousands would bring it down before the first one said a word."""

from __future__ import annotations

import os

from shardwise.errors import ConfigError, counted

__all__ = ["check_room", "memory_bytes"]

RANK_BYTES = 128 * 2**20
"""What a rank that has imported torch takes of its own, at the least."""


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_room(num_ranks: int) -> None:
    """Raises `ConfigError` where so many ranks cannot stand on this machine."""
    if num_ranks * RANK_BYTES > (memory := memory_bytes()):
        raise ConfigError(
            f"{counted(num_ranks, 'rank')} on this machine",
            why=f"each takes {RANK_BYTES // 2**20} MiB or more, and it has {memory / 2**30:,.0f} GiB",
            fix="use a smaller layout, or start them on several machines with torchrun",
        )
