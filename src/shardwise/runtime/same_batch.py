"""Checks that ranks that differ only along tp or pp receive the same rows."""

import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardwise.comm.agree import Agreement
from shardwise.comm.collectives import host_device
from shardwise.errors import BatchError, RankError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.runtime.context import SplitContext
from shardwise.runtime.modes import with_attributes
from shardwise.topology.shape import DATA_AXES

_STEPS = "the optimizers' steps"
_UNLIKE = "ranks do not train alike"
_SAME_OPTIONS = (
    "build optimizers and schedules from the same options on every rank, and make the same calls, in the same mode"
)

_MOST_READ = 2**16
_FORBIDS = -1e4  # at most this much is what attention masks add where nothing may be seen, in any dtype


def check_same_batch(
    inputs: Any, context: SplitContext, *, also: Mapping[str, Any] | None = None, numbers: Sequence[int] = ()
) -> list[list[int]]:
    """Raises the same error on every tp and pp rank unless all received the same inputs.

    Compares names, shapes and dtypes of tensors. Values are compared if they are integers or masks on the host; of
    large tensors, evenly spaced samples. Skipped inside `compared_already`, and in groups that only GPUs can
    communicate in.

    Args:
        also: other facts about the call that must be equal, by their names in the error.
        numbers: this rank's numbers; as many on every rank.

    Returns:
        The numbers of every rank, in rank order.

    Communicates: over tp and pp, one all-gather of 40 bytes per rank.
    """
    group = context.same_rows or (context.tp.group if context.mesh is not None else None)
    if group is None or context.batch_compared or torch.compiler.is_compiling():
        return [list(numbers)]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(
            "a transform of torch.func around a split model",
            why="the collectives of a split model cannot be transformed",
            fix="call loss.backward(), after which parameter.grad is complete",
        )
    fields: dict[str, str] = {}
    if host_device(group, context.device).type == "cpu":
        leaves = tree_flatten_with_path(inputs)[0]
        fields = {keystr(path): _describe(value) for path, value in leaves if isinstance(value, Tensor | int)}
        fields |= call_fingerprint(context, also or {})
    elif not numbers:
        return []
    try:
        return Agreement(
            group,
            fields,
            doing="a forward or a step",
            what=("tp" if context.same_rows is None else "tp and pp") + " ranks were given different batches",
            fix="give ranks that differ in tp or pp alone the same rows in the same order: choose them by "
            "mesh.data_rank" + ("; and call the same model in the same mode" if also else ""),
            error=BatchError,
            numbers=numbers,
        ).wait()
    except BatchError as error:
        if error.at != _STEPS:
            raise
        raise RankError(_UNLIKE, at=error.at, why=error.why, fix=_SAME_OPTIONS) from None


def agree_over_data(
    mesh: Mesh, fields: Mapping[str, str], *, fault: Exception | None, numbers: Sequence[int]
) -> Agreement:
    """Starts to compare the calls of ranks that differ only along the data axes.

    `wait` of the result raises if any rank's batch is invalid or calls differ; else it returns every rank's `numbers`.
    Ranks that differ along tp or pp have passed `check_same_batch`, so they get the same result.

    Communicates: over the data axes, like `Agreement`.
    """
    return Agreement(
        mesh.group(*DATA_AXES),
        fields,
        doing="checking its batch",
        what=_UNLIKE,
        fix=_SAME_OPTIONS,
        fault=fault,
        numbers=numbers,
    )


def call_fingerprint(context: SplitContext, also: Mapping[str, Any]) -> dict[str, str]:
    """Returns what else than rows must be equal on all ranks, as text by name: `also`, autocast, optimizer steps."""
    autocast = torch.is_autocast_enabled(context.device.type) and torch.get_autocast_dtype(context.device.type)
    described = {name: repr(value) for name, value in also.items()} | {"torch.autocast": str(autocast)}
    return described | describe_steps(context)


def describe_steps(context: SplitContext) -> dict[str, str]:
    """Returns the log of optimizer steps, as text by name. Empty in a pipeline, whose ranks have unlike parameters."""
    return {_STEPS: str(context.steps)} if context.same_rows is None else {}


def compared_already(context: SplitContext) -> AbstractContextManager[None]:
    """Context manager: forwards inside receive parts of a batch that `check_same_batch` has passed."""
    return with_attributes(context, batch_compared=True)


def _describe(value: Tensor | int) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    is_readable = value.device.type == "cpu" and not isinstance(value, FakeTensor)
    if not is_readable or value.is_complex():
        return text
    flat = value.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _MOST_READ)].contiguous()
    if value.is_floating_point():
        kinds = (sample == 0).byte() + 2 * (sample == 1) + 4 * (sample <= _FORBIDS)
        if not kinds.all():
            return text  # floats that are computed may differ in their last bits where the ranks' processors do
        sample = kinds
    return f"{text}, checksum {zlib.crc32(sample.view(torch.uint8).numpy().data):08x}"
