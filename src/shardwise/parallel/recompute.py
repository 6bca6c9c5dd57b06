"""Activation checkpointing: blocks that are recomputed in backward.

# [Note: recomputation]
A recomputed module checkpoints its own forward. Hooks on the module itself, such as FSDP2's gathering and the edges of
sequence parallelism, are not repeated: FSDP2 has already gathered the unit in backward. Everything inside is repeated,
including collectives of tensor parallelism (the modes "selective" and "alternate" keep their results). Random numbers
come from the restored state, so dropout is the same. Caches of keys would grow twice, so training forwards build none.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from shardwise.comm.collectives import functional_collectives
from shardwise.errors import ConfigError
from shardwise.parallel.facts import read_facts
from shardwise.parameters.registry import Registry
from shardwise.plan.options import Recompute
from shardwise.plan.spec import match
from shardwise.plan.structure import LayerStack, is_within, outermost, outermost_layers
from shardwise.runtime.linear import apply_mixin
from shardwise.runtime.region_edges import with_own_sums

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
_ATTENTIONS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


class _StatefulCheckpoint:
    """Checkpoint function whose recomputation uses the forward state of its own forward, not of a later one."""

    def __init__(self, run: Callable[..., Any], registry: Registry, *, is_region: bool = False) -> None:
        self.run, self.context, self.casting, self.is_region = run, registry.context, registry.casting, is_region

    def __call__(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if not self.is_region:
                return self.run(own, *args, **kwargs)
            return self.run(lambda *args, **kwargs: with_own_sums(own, self.context, args, kwargs), *args, **kwargs)
        state, again = self.context.state, self.context.state.copy()
        runs = itertools.chain([state], iter(again.copy, None))
        casting = self.casting if self.casting is not None and self.casting.is_on else None

        def forward(kwargs: dict[str, Any], *args: Any) -> Any:
            with self.context.resumed(next(runs)), casting.under_way() if casting is not None else nullcontext():
                return own(*args, **kwargs)

        # By position: only there does `checkpoint` look for the device whose random numbers are drawn again.
        return self.run(forward, kwargs, *args)


class Recomputed:
    """Mixin of a module that saves the inputs of its forward and recomputes it in backward."""

    _checkpoint: _StatefulCheckpoint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward, checkpointed if gradients are enabled."""
        own: Callable[..., Any] = super().forward  # type: ignore[misc]
        return self._checkpoint(own, *args, **kwargs) if torch.is_grad_enabled() else own(*args, **kwargs)


def apply_recomputation(model: nn.Module, registry: Registry, recompute: Recompute, names: Sequence[str]) -> None:
    """Makes the modules called `names`, which `find_recomputed` selected, drop their activations in forward and
    recompute them in backward.

    transformers' own checkpointing (`gradient_checkpointing_enable`, before or after) also gets the right state.
    """
    for module in model.modules() if registry.plan.num_parts > 1 or registry.casting is not None else ():
        own = vars(module)
        if "_gradient_checkpointing_func" in own:
            own["_gradient_checkpointing_func"] = _StatefulCheckpoint(own["_gradient_checkpointing_func"], registry)
        if isinstance(module, PreTrainedModel):
            own["_set_gradient_checkpointing"] = functools.partial(_enable_resuming, module, registry)
    run = _RUNS.get(recompute.mode, functools.partial(checkpoint, use_reentrant=False))
    regions = {id(model.get_submodule(region.fqn)) for region in registry.plan.tensor.regions}
    for module in map(model.get_submodule, names):
        apply_mixin(module, Recomputed, _checkpoint=_StatefulCheckpoint(run, registry, is_region=id(module) in regions))


def _enable_resuming(
    model: PreTrainedModel, registry: Registry, *, gradient_checkpointing_func: Any = checkpoint, **options: Any
) -> None:
    """Replaces `PreTrainedModel._set_gradient_checkpointing`: its checkpoint function restores the forward state."""
    function = _StatefulCheckpoint(gradient_checkpointing_func, registry)
    type(model)._set_gradient_checkpointing(model, gradient_checkpointing_func=function, **options)


def find_recomputed(model: nn.Module, stacks: Sequence[LayerStack], recompute: Recompute) -> tuple[str, ...]:
    """Returns the names of the modules of an unsplit model that `recompute` selects."""
    if recompute.mode in ("none", "budget"):  # a budget is kept by what compiles
        return ()
    if recompute.modules:
        return _matching(model, recompute.modules)
    names = outermost_layers(stacks)
    if recompute.mode == "attention":
        attentions = outermost(name for name, each in read_facts(model).modules.items() if each.heads and name)
        names = tuple(name for name in attentions if is_within(name, names))
    if not names:
        what = "attention that is recognised" if recompute.mode == "attention" else "layers to recompute"
        raise ConfigError(f"{type(model).__name__} has no {what}", fix="name modules by pattern")
    return names


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    chosen = [name for name in names if any(match(pattern, name) for pattern in patterns)]
    for pattern in patterns:
        if not any(match(pattern, name) for name in chosen):
            raise ConfigError(f"Recompute pattern {pattern!r} matches no module of {type(model).__name__}")
    if inner := set(chosen) - set(outermost(chosen)):
        raise ConfigError(f"{min(inner)} is inside another module that is recomputed", fix="name only one of them")
    return tuple(chosen)


def _run_selectively(kept: Callable[[], Any], own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # regions give values there by themselves
            return own(*args, **kwargs)
        with functional_collectives():
            return own(*args, **kwargs)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=kept, **kwargs)


def _keep_expensive(every: int) -> Any:
    """Checkpoint contexts that keep the results of collectives, attention, and every n-th matrix product."""
    counts = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation in _ATTENTIONS or operation.namespace == "_c10d_functional"
        if operation in _PRODUCTS:
            is_kept = counts[context.is_recompute] % every == 0
            counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_RUNS: dict[str, Callable[..., Any]] = {
    "selective": functools.partial(_run_selectively, functools.partial(_keep_expensive, 1)),
    "alternate": functools.partial(_run_selectively, functools.partial(_keep_expensive, 2)),
}
