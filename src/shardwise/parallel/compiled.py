"""`torch.compile` of every layer, in place: names stay, and so does everything that hangs on a layer from outside.

A layer compiles as one function with the edges of its split regions inside; collectives and FSDP2's hooks run between
compiled parts. Layers of one class share what was compiled for the first of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.plan.options import Compile
from shardwise.plan.structure import outermost_layers
from shardwise.runtime.registry import Registry

__all__ = ["CompileCount", "apply_compilation", "count_compilation"]


@dataclass(frozen=True)
class CompileCount:
    """What torch.compile has done in this process; `str` says it in words.

    Attributes:
        graphs: pieces of code compiled, recompilations included.
        recompiles: how many of them were compiled before, for other inputs; of the last 64 pieces.
        graph_breaks: reasons why a graph ended, each with how often.
    """

    graphs: int
    recompiles: int
    graph_breaks: Counter[str]

    def __str__(self) -> str:
        breaks = sum(self.graph_breaks.values())
        reasons = "".join(f"; {count} x {reason}" for reason, count in self.graph_breaks.most_common(3))
        return f"{self.graphs} graph(s), {self.recompiles} recompiled, {breaks} graph break(s){reasons}"


def apply_compilation(model: nn.Module, registry: Registry, choice: Compile | None) -> None:
    """Compiles the layers of `model` when they are first run. Communicates nothing.

    Where something drops under tp, graphs end at every change of the stream of random numbers: torch would compile them
    again for every seed.
    """
    if choice is None:
        return
    context: Any = registry.context
    if context.has_dropout and context.size > 1:
        context.fork_rng = torch.compiler.disable(context.fork_rng)
        context.restore_rng = torch.compiler.disable(context.restore_rng)
    for layer in outermost_layers(registry.plan.stacks):
        model.get_submodule(layer).compile(backend=choice.backend, dynamic=choice.dynamic)


def count_compilation() -> CompileCount:
    """The counts of torch's own bookkeeping."""
    # slow to import, and not needed by anyone who does not compile
    from torch._dynamo.utils import counters, get_compilation_metrics

    breaks = Counter({str(reason).splitlines()[0]: count for reason, count in counters["graph_break"].items()})
    recompiles = sum(metrics.recompile_reason is not None for metrics in get_compilation_metrics())
    return CompileCount(graphs=counters["stats"]["unique_graphs"], recompiles=recompiles, graph_breaks=breaks)
