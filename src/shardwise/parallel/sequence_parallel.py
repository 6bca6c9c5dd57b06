"""Sequence parallelism: where the hidden states are split along the sequence and gathered again.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parameters.registry import Registry
from shardwise.plan.decision import SplitPlan
from shardwise.plan.structure import is_within, parent_of
from shardwise.runtime.context import SplitContext
from shardwise.runtime.modes import in_eval_mode
from shardwise.runtime.sequence_edges import install_full, install_owner, install_parts, install_stack

__all__ = ["apply_sequence_parallelism", "is_direct"]


class _ReachedError(Exception):
    """The first layer was reached; carries its input, None where its other inputs are learned, too."""

    def __init__(self, hidden_states: Tensor | None) -> None:
        super().__init__()
        self.hidden_states = hidden_states


def apply_sequence_parallelism(model: nn.Module, registry: Registry, *, embedding: str | None) -> None:
    """Splits the sequence over the layer stack that the plan names, if it names one. Communicates nothing.

    Args:
        embedding: the vocabulary embedding, if `is_direct` said of the model, before its modules changed, that its rows
            are all that enters the layers.
    """
    plan, context = registry.plan.sequence, registry.context
    if plan is None:
        return
    context.partial_after = plan.partial_after
    for fqn in plan.full_sequence:
        stack_around = next(stack.fqn for stack in plan.stacks if is_within(fqn, (stack.fqn,)))
        install_full(model.get_submodule(fqn), fqn, stack_around, context)
    for stack in plan.stacks:
        layers: Any = model.get_submodule(stack.fqn)
        install_stack(layers, stack.fqn, context, partial_after=stack.partial_after)
        owner = model.get_submodule(parent_of(stack.fqn))  # its forward embeds, then runs the layers
        install_owner(owner, stack.fqn, context)
        if embedding is not None:
            _defer_sum(model.get_submodule(embedding), owner, layers, context)
    inputs: dict[str, list[str]] = {}
    regions = {region.fqn for region in registry.plan.regions}  # these split their own inputs
    for fqn in plan.inputs:
        if parent_of(fqn) not in regions:
            inputs.setdefault(parent_of(fqn), []).append(fqn.rpartition(".")[2])
    for layer, names in inputs.items():
        install_parts(model.get_submodule(layer), names, context)


def _defer_sum(embedding: nn.Module, owner: nn.Module, layers: nn.ModuleList, context: SplitContext) -> None:
    """Lets the embedding, where `owner` calls it on the way to its layers, defer the sum over ranks to their entry."""
    embedding._may_defer = True  # type: ignore[assignment]

    def defer(module: nn.Module, args: Any) -> None:
        # A layer that is recomputed in backward must not ask whether its input was summed already.
        recomputes = getattr(layers[0], "gradient_checkpointing", False)
        context.state.defer_embedding = not (recomputes or context.state.hands_out_hidden)

    owner.register_forward_pre_hook(defer)


def is_direct(model: nn.Module, plan: SplitPlan, embedding: str | None) -> bool:
    """Whether the rows looked up in a split embedding, perhaps scaled, are all that enters the layers.

    Then their sum over ranks can wait until the stack splits it along the sequence: a reduce-scatter instead of an
    all-reduce and a slice. Found by running what comes before the first layer on synthetic rows.
    """
    stacks = plan.sequence.stacks if plan.sequence is not None else ()
    if len(stacks) != 1 or embedding is None or plan.modules.get(embedding) != "embedding_rowwise":
        return False
    layers: Any = model.get_submodule(stacks[0].fqn)
    module = model.get_submodule(embedding)
    weight = module.get_parameter("weight")
    # Of mixed signs and magnitudes, and drawn from no stream of the caller's.
    rows = torch.arange(4 * weight.shape[1], device=weight.device).cos().to(weight.dtype).view(1, 4, -1)
    rows = rows.requires_grad_() * 1.0  # what else is computed from them needs a gradient, too
    hidden = _prologue(model, module, layers, rows)
    if hidden is rows:
        return True
    if hidden is None or hidden.shape != rows.shape or hidden.is_meta:
        return False
    twice = _prologue(model, module, layers, rows * 2)
    return twice is not None and torch.equal(twice, hidden * 2) and bool((hidden * rows >= 0).all())


def _prologue(model: nn.Module, embedding: nn.Module, layers: nn.ModuleList, rows: Tensor) -> Tensor | None:
    """The first layer's input when the embedding gives `rows`.

    None where the model cannot run on its own like this, or where its other inputs are computed from rows, too.
    """

    def reached(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value is not hidden]
        raise _ReachedError(None if any(value.requires_grad for value in others) else hidden)

    hooks = [
        embedding.register_forward_hook(lambda module, args, output: rows, prepend=True),
        layers[0].register_forward_pre_hook(reached, with_kwargs=True, prepend=True),
    ]
    try:
        with torch.enable_grad(), in_eval_mode(model):
            model(input_ids=torch.zeros(1, 4, dtype=torch.long, device=rows.device))
    except _ReachedError as stop:
        return stop.hidden_states
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        # The model wants other inputs, or cannot run on the meta device: nothing is known, so nothing is deferred.
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return None
