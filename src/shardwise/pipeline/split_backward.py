"""A backward in two parts: first the gradients of a stage's inputs, for which another stage waits, later those of
weights.

# [Note: split backward]
For every weight, torch finds the nodes at which its path meets the path of the inputs. The first part keeps the
gradients that arrive there, and the second part continues from there. A weight whose path never meets the path of the
inputs, because an output depends on weights alone, would be lost. So outputs are tied to inputs, which adds nothing to
any gradient. A stage whose inputs need no gradient has no first part: its whole backward is the second.
`check_complete` checks in the graph that no weight is left out.

torch groups weights that meet the inputs at the same node, but not weights that share nodes with two others (a T5
decoder's first layer, whose self-attention depends on no input of the stage). Such a weight is in several groups and
would be counted several times, so overlapping groups are joined (`_joined`). A path between two nodes of a group may
lead through those of another group, so the graph is kept until all groups are done.

torch before 2.13 computes wrong gradients for weights that a stage uses twice. Only there, the second part computes the
gradients of the activations again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as torch_backward

from shardwise.errors import LayoutError

_FINDS_ALL_USES = hasattr(torch_backward, "_autograd_grad_for_inputs")  # torch 2.13


def detached_alias(x: Tensor) -> Tensor:
    """`x` as a separate tensor that shares its memory and is no view: it may be detached or written to in place."""
    return torch.ops.aten._unsafe_view(x, x.shape)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.num_inputs = len(tensors) - num_outputs
        return tuple(detached_alias(x.detach()) for x in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradients, *(None,) * ctx.num_inputs)


def tie(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`outputs`, where those with gradients also depend on `inputs`. The gradients of `inputs` do not change."""
    needed = [x for x in inputs if x.requires_grad]
    tied = [x for x in outputs if x.requires_grad]
    if not needed or not tied:
        return tuple(outputs)
    replaced = iter(_Tie.apply(len(tied), *tied, *needed))
    return tuple(next(replaced) if x.requires_grad else x for x in outputs)


def backward_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Iterable[nn.Parameter]
) -> tuple[list[Tensor | None], SecondPart]:
    """First part of a backward: returns the gradients of `inputs`, and a function that computes those of `weights`.

    Args:
        outputs: outputs that are tied to `inputs`.
    """
    needed = [x for x in inputs if x.requires_grad]
    own = list(weights)
    if _FINDS_ALL_USES:
        found, groups = torch_backward.stage_backward_input(list(outputs), list(gradients), needed, iter(own))
        second = SecondPart(own, groups=_joined(groups))
    else:
        found = torch.autograd.grad(outputs, needed, gradients, retain_graph=True, allow_unused=True)
        second = SecondPart(own, outputs=outputs, gradients=gradients)
    for x in needed:
        x.grad = None
    by_input = iter(found)
    return [next(by_input) if x.requires_grad else None for x in inputs], second


def _joined(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Torch's groups of weights, with overlapping groups joined, without nodes that no gradient has reached."""
    joined: list[tuple[set[Any], dict[Any, Any]]] = []
    for group in groups:
        weights = set(group["params"])
        reached = zip(group["intermediates"], group.get("grads") or [], strict=False)
        nodes = {node: gradients for node, gradients in reached if gradients is not None}
        apart = []
        for other in joined:
            if weights.isdisjoint(other[0]) and nodes.keys().isdisjoint(other[1]):
                apart.append(other)
            else:
                weights, nodes = weights | other[0], other[1] | nodes
        joined = [*apart, (weights, nodes)]
    return [
        {"params": weights, "intermediates": list(nodes), "grads": list(nodes.values())} for weights, nodes in joined
    ]


def _hold(node: Any, saved: Any) -> Any:
    """Makes the second part begin at a node with the gradients that the first part recorded there. Tensor hooks have
    already changed them, and would do so again.
    """
    return node.register_prehook(lambda _: saved)


class SecondPart:
    """Second part of a backward: adds the gradients of weights to `.grad` when called, once."""

    def __init__(
        self,
        weights: list[nn.Parameter],
        *,
        groups: Any = None,
        outputs: Sequence[Tensor] = (),
        gradients: Sequence[Tensor] = (),
    ) -> None:
        self.weights, self.groups, self._outputs, self._gradients = weights, groups, outputs, gradients

    def __call__(self) -> None:
        if self.groups is not None:
            noted = (zip(group["intermediates"], group["grads"], strict=True) for group in self.groups)
            handles = [_hold(node, saved) for pairs in noted for node, saved in pairs]
            try:
                torch_backward.stage_backward_weight(iter(self.weights), self.groups, retain_graph=True)
            finally:
                for handle in handles:
                    handle.remove()
            self.groups = []
        elif trained := [weight for weight in self.weights if weight.requires_grad]:
            torch.autograd.backward(self._outputs, self._gradients, inputs=trained)


def check_complete(ends: Sequence[Any], inputs: Sequence[Tensor], second: SecondPart, *, stage: int) -> None:
    """Raises if a weight on which the outputs depend is in no group of the second part. Its gradient would be lost
    silently.

    Args:
        ends: the outputs' graph nodes, which the outputs release in the first part.

    Raises:
        LayoutError: names the number and shapes of such weights.
    """
    if second.groups is None:
        return
    known = {node for group in second.groups for node in group["params"]}
    own = {id(x) for x in inputs}
    lost = [node.variable for node in _accumulating(ends) if node not in known and id(node.variable) not in own]
    if lost:
        raise LayoutError(
            f"gradients of {len(lost)} parameters of stage {stage} would be lost",
            why="the backward is in two parts, and the second does not reach "
            + ", ".join(sorted({str(list(x.shape)) for x in lost})),
            fix='use a schedule that does not split the backward, such as "1f1b" or "interleaved_1f1b"',
        )


def _accumulating(roots: Iterable[Any]) -> list[Any]:
    """Leaf nodes of the graph, which add to `.grad`."""
    pending, seen, found = [root for root in roots if root is not None], set(), []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node)
        pending += [following for following, _ in node.next_functions if following is not None]
    return found
