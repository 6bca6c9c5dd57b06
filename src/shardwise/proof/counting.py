"""How many collectives a layer costs: counted over tp while a step runs, forward and backward apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from shardwise.comm.count import CommunicationCount
from shardwise.layers.registry import registry_of
from shardwise.mesh import Mesh

__all__ = ["LayerCollectives", "counted_layers"]

_ITEM = re.compile(r"(.*?\.\d+)(?=\.|$)")


@dataclass
class LayerCollectives:
    """What was executed inside of layers, over all of their runs; gradients that are summed after backward are not.

    Attributes:
        runs: how many times a layer ran.
        forward: collectives in their forwards.
        backward: collectives in their backwards.
    """

    runs: int = 0
    forward: int = 0
    backward: int = 0

    @property
    def per_run(self) -> tuple[float, float] | None:
        """Forward and backward for one run of a layer; None where no layer was seen to run."""
        return (self.forward / self.runs, self.backward / self.runs) if self.runs else None


@contextmanager
def counted_layers(model: nn.Module, mesh: Mesh) -> Iterator[LayerCollectives]:
    """Inside, collectives over tp in the layers of a split model are counted, on this rank.

    The backward of a layer is that of the autograd nodes between its outputs and its inputs. What splits and joins the
    sequence at the ends of a stack is no layer's.
    """
    tally, group = LayerCollectives(), mesh.group("tp")
    if not isinstance(group, dist.ProcessGroup):
        yield tally
        return
    count = CommunicationCount(group=group)
    counter = _Counter(count, tally)
    inner = registry_of(model).plan.sequence_parallel  # the ends of a stack are hooks of its layers
    with ExitStack() as stack, count:
        for name in sorted(_layers(model)):
            layer = model.get_submodule(name)
            enter = nn.Module.register_forward_pre_hook(layer, counter.enter, with_kwargs=True, prepend=not inner)
            leave = nn.Module.register_forward_hook(layer, counter.leave, prepend=inner)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield tally


class _Counter:
    """The hooks: forwards are counted between a layer's two, backwards around every node that may communicate."""

    def __init__(self, count: CommunicationCount, tally: LayerCollectives) -> None:
        self.count, self.tally = count, tally
        self.entered: list[tuple[int, set[Any]]] = []
        self.seen: set[Any] = set()
        self.before = 0

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.entered.append((self.count.num_calls(), set(_nodes([args, kwargs]))))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        before, outside = self.entered.pop()
        self.tally.runs += 1
        self.tally.forward += self.count.num_calls() - before
        waiting = list(_nodes(output))
        while waiting:
            node = waiting.pop()
            if node in outside or node in self.seen:
                continue
            self.seen.add(node)
            waiting += [each for each, _ in node.next_functions if each is not None]
            if isinstance(node, BackwardCFunction):
                node.register_prehook(self._begin)
                node.register_hook(self._end)

    def _begin(self, gradients: Any) -> None:
        self.before = self.count.num_calls()

    def _end(self, inputs: Any, outputs: Any) -> None:
        self.tally.backward += self.count.num_calls() - self.before


def _nodes(value: Any) -> Iterator[Any]:
    """The autograd nodes that made the tensors of a nested value."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _nodes(each)
    elif isinstance(value, dict):
        yield from _nodes(list(value.values()))


def _layers(model: nn.Module) -> set[str]:
    """Names of the layers that hold regions: items of the outermost lists, or of lists of layers inside (stages)."""
    regions = [f"{region.fqn}." for region in registry_of(model).plan.regions]
    found: set[str] = set()
    waiting = {item[1] for name in regions if (item := _ITEM.match(name)) is not None}
    while waiting:
        name = waiting.pop()
        inside = _stacks_in(model, name, regions)
        waiting |= {f"{stack}.{index}" for stack in inside for index in range(len(_items(model, stack)))}
        if not inside:
            found |= _stack_around(model, name)
    return found


def _stack_around(model: nn.Module, name: str) -> set[str]:
    """A layer, and its neighbours of the same list, which may cost nothing."""
    stack = name.rpartition(".")[0]
    items = model.get_submodule(stack)
    return {f"{stack}.{index}" for index in range(len(items))} if isinstance(items, nn.ModuleList) else {name}


def _stacks_in(model: nn.Module, layer: str, regions: list[str]) -> list[str]:
    """The lists of layers in what is itself an item of a list.

    Items that are alike, each with several regions or with nothing split beside them; a list of an attention and an
    MLP, or of experts beside an attention, is none.
    """
    own = [region for region in regions if region.startswith(f"{layer}.")]
    found: list[str] = []
    for child, module in model.get_submodule(layer).named_modules(prefix=layer):
        if not isinstance(module, nn.ModuleList) or any(child.startswith(f"{other}.") for other in found):
            continue
        inside = [region for region in own if region.startswith(f"{child}.") and region != f"{child}."]
        several = len(inside) >= 2 * len(module)
        if inside and len({type(item) for item in module}) == 1 and (several or len(inside) == len(own)):
            found.append(child)
    return found


def _items(model: nn.Module, stack: str) -> nn.ModuleList:
    items = model.get_submodule(stack)
    assert isinstance(items, nn.ModuleList)
    return items
