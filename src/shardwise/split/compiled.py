"""`torch.compile` of every block, in place: names stay, and so does everything that hangs on a block from outside.

A block compiles as one function with the edges of its split regions inside; collectives and FSDP2's hooks run between
compiled parts. Blocks of one class share what was compiled for the first of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.plan.options import Compile
from shardwise.split.blocks import find_blocks

__all__ = ["CompileCount", "apply_compilation", "count_compilation"]


@dataclass(frozen=True)
class CompileCount:
    """What torch.compile has done in this process since `torch.compiler.reset()`.

    Attributes:
        frames: pieces of code compiled, recompilations included.
        recompiles: how many of them were compiled before, for other inputs.
        graph_breaks: reasons why a graph ended, each with how often.
    """

    frames: int
    recompiles: int
    graph_breaks: Counter[str]


def apply_compilation(model: nn.Module, choice: Compile | None) -> None:
    """Compiles the blocks of `model` when they are first run. Communicates nothing."""
    if choice is None:
        return
    for block in find_blocks(model):
        block.compile(backend=choice.backend, dynamic=choice.dynamic)


def count_compilation() -> CompileCount:
    """The counts of torch's own bookkeeping."""
    from torch._dynamo.utils import counters  # slow to import, and not needed by anyone who does not compile

    frames: Counter[Any] = counters["frames"]
    breaks = Counter({str(reason).splitlines()[0]: count for reason, count in counters["graph_break"].items()})
    recompiles = sum(counters["recompiles"].values()) if "recompiles" in counters else 0
    return CompileCount(frames=frames["ok"], recompiles=recompiles, graph_breaks=breaks)
