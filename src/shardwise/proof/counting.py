"""Counts the tp collectives of a layer in one step, forward and backward separately."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from shardwise.comm.count import CommunicationCount
from shardwise.mesh import Mesh
from shardwise.parameters.registry import registry_of
from shardwise.plan.decision import SplitPlan
from shardwise.plan.structure import is_within, outermost_layers, parent_of


@dataclass
class LayerCollectives:
    """Collectives inside of layers, over all runs; without gradients that are summed after backward."""

    runs: int = 0
    forward: int = 0
    backward: int = 0

    @property
    def per_run(self) -> tuple[float, float] | None:
        """Collectives in forward and backward per run of a layer; None if no layer ran."""
        return (self.forward / self.runs, self.backward / self.runs) if self.runs else None


@contextmanager
def counted_layers(model: nn.Module, mesh: Mesh) -> Iterator[LayerCollectives]:
    """Context manager: counts this rank's tp collectives in the layers of a split model.

    The backward of a layer consists of the autograd nodes between its outputs and its inputs. Splitting and gathering
    the sequence at the ends of a stack belongs to no layer.
    """
    tally, group = LayerCollectives(), mesh.group("tp")
    if not isinstance(group, dist.ProcessGroup):
        yield tally
        return
    count = CommunicationCount(group=group)
    counter = _Counter(count, tally)
    plan = registry_of(model).plan
    inner = plan.tokens is not None  # the ends of a stack are hooks of its layers
    with ExitStack() as stack, count:
        for name in sorted(_layers(plan)):
            layer = model.get_submodule(name)
            enter = nn.Module.register_forward_pre_hook(layer, counter.enter, with_kwargs=True, prepend=not inner)
            leave = nn.Module.register_forward_hook(layer, counter.leave, prepend=inner)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield tally


class _Counter:
    """Hooks that count: forwards between a layer's two hooks, backwards around every node that may communicate."""

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
        waiting = _nodes(output)
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


def _nodes(value: Any) -> list[Any]:
    """Returns the autograd nodes that made the tensors in a nested value."""
    return [x.grad_fn for x in tree_leaves(value) if isinstance(x, Tensor) and x.grad_fn is not None]


def _layers(plan: SplitPlan) -> set[str]:
    """Returns the FQNs of the outermost layers that hold regions."""
    regions = [parent_of(region.fqn) for region in plan.tensor.regions]
    stacks = [each for each in plan.stacks if any(is_within(region, (each.fqn,)) for region in regions)]
    return set(outermost_layers(stacks))
