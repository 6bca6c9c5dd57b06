"""How a causal language model uses its labels: found out once by a tiny model, and kept on disk."""

from __future__ import annotations

from dataclasses import asdict

from torch import nn

from shardwise.loss.label_use import LabelUse, claims_to_shift
from shardwise.search.kept import keep, path_of, read_kept
from shardwise.tiny.label_use import probe_label_use

__all__ = ["find_label_use"]

_PROBE = 1
"""Raised with every change of what is found."""


def find_label_use(model: nn.Module) -> LabelUse | None:
    """As `probe_label_use`, or what an earlier call found for such a model. Communicates nothing."""
    if not claims_to_shift(model):
        return None
    path = path_of(model, "labels", {"probe": _PROBE})
    kept = read_kept(path, dict)
    if kept == {}:
        return None
    if kept is not None and set(kept) == {"shifts", "sees_target"}:
        return LabelUse(**{name: bool(value) for name, value in kept.items()})
    found = probe_label_use(model)
    keep(path, {} if found is None else asdict(found))
    return found
