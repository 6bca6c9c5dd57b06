"""Guards the model's own doors, so that a rank's part is never passed off as the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.layers.canonical import local_tensor
from shardwise.layers.registry import Registry

__all__ = ["guard_door", "open_door"]

_OPEN = "_shardwise_door_open"


def guard_door(model: nn.Module, registry: Registry) -> None:
    """Makes `model.state_dict()` refuse where parameters are split, and `load_state_dict` cut whole tensors to size."""
    if registry.plan.tp_size == 1:
        return

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not getattr(model, _OPEN, False):
            raise ShardwiseError(
                f"state_dict() of a {type(model).__name__} that is split over tp={registry.plan.tp_size}",
                why="this rank holds parts of its parameters, which would pass for whole ones",
                fix="use shardwise.full_state_dict(model), or shardwise.export_pretrained(model, directory) to save",
            )

    def cut(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for fqn, value in list(state.items()):
            name = fqn.removeprefix(prefix)
            if not isinstance(value, Tensor) or registry.tied.get(name, name) not in registry.entries:
                continue
            entry = registry.entry(name)
            if entry.split is not None and tuple(value.shape) == entry.layout.shape:
                state[fqn] = local_tensor(value, entry.layout, registry.mesh.coords)

    def refuse_resize(*args: Any, **kwargs: Any) -> None:
        raise ShardwiseError(
            "resize_token_embeddings on a split model",
            why="the vocabulary is divided among ranks already",
            fix="resize the whole model before shardwise.parallelize, or export and load it again",
        )

    model.register_state_dict_pre_hook(refuse)
    model.register_load_state_dict_pre_hook(cut)
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = refuse_resize


@contextmanager
def open_door(model: nn.Module) -> Iterator[None]:
    """Inside, `model.state_dict()` gives this rank's parts."""
    object.__setattr__(model, _OPEN, True)
    try:
        yield
    finally:
        object.__setattr__(model, _OPEN, False)
