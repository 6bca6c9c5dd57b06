"""What leaves a split model: full state, full gradients, plain Hugging Face directories."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from shardwise.checkpoint.export import write_pretrained
from shardwise.runtime.canonical import canonical_tensors, state_names
from shardwise.runtime.registry import find_parameters, named_entries, registry_of, reshard
from shardwise.train.gradients import gradients_of

__all__ = ["export_pretrained", "full_gradients", "full_state_dict"]


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The state dict of the unsplit model: Hugging Face names, full CPU tensors, tied names included.

    Args:
        rank0_only: only rank 0 receives it, and the others an empty dict: they never hold a full tensor.

    Communicates: over tp, one all-gather (with `rank0_only` a gather) of each split parameter; over pp, one broadcast
        (with `rank0_only` a message to rank 0) of each parameter.
    """
    registry = registry_of(model)
    reshard(model)
    entries, values = named_entries(model), {name: each.detach() for name, each, _ in find_parameters(model)}
    found = {entries[name].fqn: full for name, full in canonical_tensors(model, values, rank0_only=rank0_only)}
    state: dict[str, Tensor] = {}
    for fqn, value in state_names(model, remove_duplicate=False).items():
        full = found.get(entries[fqn].fqn) if fqn in entries else None
        if fqn not in entries and value is not None and not (rank0_only and registry.mesh.rank):
            full = value.detach().to("cpu", copy=True)
        if full is not None:
            state[fqn] = full
    return state


def full_gradients(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Tensor]:
    """The gradients of the unsplit model by Hugging Face name: full CPU tensors, for parameters that have one.

    Communicates: gathers as `full_state_dict` does.
    """
    reshard(model)
    gradients_of(model).complete()
    found = {name: each.grad for name, each, _ in find_parameters(model) if each.grad is not None}
    full = canonical_tensors(model, found, rank0_only=rank0_only)
    return {name: gradient for name, gradient in full if gradient is not None}


def export_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9, tokenizer: Any = None
) -> None:
    """Writes a split model as a plain Hugging Face directory, which `from_pretrained` loads without Shardwise.

    Weights are streamed tensor by tensor, in the names and format of the checkpoint they came from; memory is bounded
    by one shard, on rank 0 alone. The directory appears complete or not at all.

    Args:
        directory: where to; other files in it are kept, its old weights replaced.
        max_shard_bytes: of tensors per file.
        tokenizer: saved with the weights; by default that of the directory the model was loaded from, if it has one.

    Raises:
        LoadError: a file cannot be written. The same error on every rank; the directory is then as it was.
        LayoutError: ranks hold different copies of a parameter.

    Communicates: over all ranks, one gather of digests; over tp, one gather to rank 0 of each split parameter.
    """
    write_pretrained(model, directory, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer)
