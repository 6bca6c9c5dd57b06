"""Ranks that differ along tp or pp compute parts of one result, so they must be given the same rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardwise.comm.agree import check_equal
from shardwise.comm.operations import Group, host_device
from shardwise.errors import BatchError, RankError, UnsupportedError
from shardwise.runtime.context import SplitContext

__all__ = ["check_same_batch", "check_same_call", "compared_already", "describe_call", "describe_steps", "words_of"]

_STEPS = "the optimizers' steps"
_UNLIKE = "ranks do not train alike"
_SAME_OPTIONS = (
    "build optimizers and schedules from the same options on every rank, and make the same calls, in the same mode"
)

_MOST_READ = 2**16
_FORBIDS = -1e4
"""At most this much is what attention masks add where nothing may be seen, in any dtype."""


def check_same_batch(inputs: Any, context: SplitContext, *, also: Mapping[str, Any] | None = None) -> None:
    """Raises the same error on every tp and pp rank unless all were given the same inputs: tensors of the same names,
    shapes and dtypes, and, where they are integers or masks on the host, of the same values (of large ones, evenly
    spaced samples).

    Args:
        also: what must be the same besides about how the model is called, by what it is called in the error.

    Does nothing where that costs more than a word between hosts: where `compared_already`, and in a group that only
    GPUs can communicate in.

    Raises:
        RankError: their optimizers have taken other steps since the model was split.
        BatchError: naming the first input that differs, and what it is on which ranks.
        UnsupportedError: in a transform of `torch.func`.

    Communicates: over the ranks that read the same rows (tp and pp), one all-gather of 16 bytes a rank.
    """
    group = context.same_rows if context.same_rows is not None else context.group if context.mesh is not None else None
    if group is None or context.batch_compared or torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(
            "a transform of torch.func around a split model",
            why="the collectives of a split model cannot be transformed",
            fix="call loss.backward(), after which parameter.grad is complete",
        )
    if host_device(group, context.device).type == "cpu":
        described = {
            keystr(path): _describe(value)
            for path, value in tree_flatten_with_path(inputs)[0]
            if isinstance(value, Tensor | int)
        }
        described |= describe_call(context, also or {})
        try:
            check_equal(
                group,
                described,
                what=("tp" if context.same_rows is None else "tp and pp") + " ranks were given different batches",
                device=context.device,
                fix="give ranks that differ in tp or pp alone the same rows in the same order: choose them by "
                "mesh.data_rank" + ("; and call the same model in the same mode" if also else ""),
                error=BatchError,
            )
        except BatchError as error:
            if error.at != _STEPS:
                raise
            raise RankError(_UNLIKE, at=error.at, why=error.why, fix=_SAME_OPTIONS) from None


def describe_call(context: SplitContext, also: Mapping[str, Any]) -> dict[str, str]:
    """What ranks must have in common besides their rows, as text by name: `also`, and what happened before."""
    autocast = torch.is_autocast_enabled(context.device.type) and torch.get_autocast_dtype(context.device.type)
    described = {name: repr(value) for name, value in also.items()} | {"torch.autocast": str(autocast)}
    return described | describe_steps(context)


def describe_steps(context: SplitContext) -> dict[str, str]:
    """Which steps optimizers have taken, as text by name; nothing over stages, which have parameters of their own."""
    return {_STEPS: str(context.steps)} if context.same_rows is None else {}


def words_of(described: Mapping[str, str]) -> tuple[int, int]:
    """Numbers whose sums over ranks say whether all of them have the same: a checksum, and its square."""
    word = zlib.crc32(str(described).encode()) % 2**20
    return word, word * word


def check_same_call(group: Group, described: Mapping[str, str], sums: tuple[int, int], context: SplitContext) -> None:
    """Raises the same `RankError` on every rank of the group unless what `describe_call` says is the same on all.

    Args:
        sums: those of `words_of` over the group.

    Communicates: what `check_equal` does, where it differs.
    """
    words, squares = sums
    if squares * group.size() != words**2:  # by Cauchy and Schwarz
        check_equal(group, described, what=_UNLIKE, fix=_SAME_OPTIONS, device=context.device)


@contextmanager
def compared_already(context: SplitContext) -> Iterator[None]:
    """Inside, the inputs of forwards are parts of a batch that `check_same_batch` has passed."""
    context.batch_compared = True
    try:
        yield
    finally:
        context.batch_compared = False


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
