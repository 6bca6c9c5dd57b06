"""Recomputation (activation checkpointing): blocks that are computed again in backward instead of kept.

# [Note: recomputation]
A recomputed module checkpoints its own forward. What hangs on the module from outside, FSDP2's gathering and the edges
of sequence parallelism, is not repeated: in backward FSDP2 has gathered the unit already when its forward runs again.
What happens inside is repeated, collectives of tensor parallelism included (they are kept where the mode is
"selective" or "alternate"), and random numbers are drawn from the restored state, so dropout is the same. Caches of
keys would grow twice; training forwards build none (see `caches.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from shardwise.comm.operations import functional_collectives
from shardwise.errors import ConfigError
from shardwise.parallel.facts import read_facts
from shardwise.parameters.registry import Registry
from shardwise.plan.match import match
from shardwise.plan.options import Recompute
from shardwise.plan.structure import LayerStack, outermost, outermost_layers
from shardwise.runtime.linear import apply_mixin
from shardwise.runtime.region_edges import with_own_sums

__all__ = ["apply_recomputation", "find_recomputed"]

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


class _Resuming:
    """A checkpoint whose second run is given the state of the forward that it belongs to: others may have run since."""

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
    """Mixin: keeps the inputs of its forward and computes it again in backward."""

    _checkpoint: _Resuming

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward, checkpointed where a gradient is wanted."""
        own: Callable[..., Any] = super().forward  # type: ignore[misc]
        return self._checkpoint(own, *args, **kwargs) if torch.is_grad_enabled() else own(*args, **kwargs)


def apply_recomputation(model: nn.Module, registry: Registry, recompute: Recompute, names: Sequence[str]) -> None:
    """Makes the modules called `names` (`find_recomputed`) compute their forward again in backward, in place. What
    transformers itself runs again (`gradient_checkpointing_enable`, before or after) belongs to its own forward, too.

    Communicates: nothing; a recomputed forward repeats what it communicates.
    """
    for module in model.modules() if registry.context.tp.size > 1 or registry.casting is not None else ():
        own = vars(module)
        if "_gradient_checkpointing_func" in own:
            own["_gradient_checkpointing_func"] = _Resuming(own["_gradient_checkpointing_func"], registry)
        if isinstance(module, PreTrainedModel):
            own["_set_gradient_checkpointing"] = functools.partial(_enable_resuming, module, registry)
    run = _RUNS.get(recompute.mode, functools.partial(checkpoint, use_reentrant=False))
    regions = {id(model.get_submodule(region.fqn)) for region in registry.plan.regions}
    for module in map(model.get_submodule, names):
        apply_mixin(module, Recomputed, _checkpoint=_Resuming(run, registry, is_region=id(module) in regions))


def _enable_resuming(
    model: PreTrainedModel, registry: Registry, *, gradient_checkpointing_func: Any = checkpoint, **options: Any
) -> None:
    """`PreTrainedModel._set_gradient_checkpointing`, with a function that resumes."""
    function = _Resuming(gradient_checkpointing_func, registry)
    type(model)._set_gradient_checkpointing(model, gradient_checkpointing_func=function, **options)


def find_recomputed(model: nn.Module, stacks: Sequence[LayerStack], recompute: Recompute) -> tuple[str, ...]:
    """The names of the modules of an unsplit model that `recompute` asks for.

    Raises:
        ConfigError: a pattern names no module, one module is inside another, or the model has no attention to name.
    """
    if recompute.mode in ("none", "budget"):  # a budget is kept by what compiles
        return ()
    if recompute.modules:
        return _matching(model, recompute.modules)
    names = outermost_layers(stacks)[:: recompute.every]
    if recompute.mode == "attention":
        layers = tuple(f"{layer}." for layer in names)
        names = tuple(name for name in _attentions(model) if name.startswith(layers))
    if not names:
        what = "attention that is recognised" if recompute.mode == "attention" else "layers to recompute"
        raise ConfigError(f"{type(model).__name__} has no {what}", fix="name modules by pattern")
    return names


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(match(pattern, name) for name in names):
            raise ConfigError(f"Recompute pattern {pattern!r} matches no module of {type(model).__name__}")
    chosen = [name for name in names if any(match(pattern, name) for pattern in patterns)]
    for name in chosen:
        outer = next((each for each in chosen if name.startswith(f"{each}.")), None)
        if outer is not None:
            raise ConfigError(f"{name} is inside {outer}, and both are to be recomputed", fix="name only one of them")
    return tuple(chosen)


def _attentions(model: nn.Module) -> list[str]:
    """The outermost modules that know their heads."""
    return outermost(name for name, each in read_facts(model).modules.items() if each.heads is not None and name)


def _run_selectively(kept: Callable[[], Any], own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # regions give values there by themselves
            return own(*args, **kwargs)
        with functional_collectives():
            return own(*args, **kwargs)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=kept, **kwargs)


def _keep_expensive() -> Any:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation in _PRODUCTS or _is_always_kept(operation)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _keep_alternate() -> Any:
    counts = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = _is_always_kept(operation)
        if operation in _PRODUCTS:
            counts[context.is_recompute] += 1
            is_kept = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _is_always_kept(operation: Any) -> bool:
    return operation in _ATTENTIONS or operation.namespace == "_c10d_functional"


def _run_offloaded(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    host = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())

    def pack(value: Tensor) -> Any:  # masks and positions are shared by all blocks
        return host.pack_hook(value) if value.requires_grad else value

    def unpack(kept: Any) -> Any:
        return host.unpack_hook(kept) if isinstance(kept, tuple) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return checkpoint(own, *args, use_reentrant=False, **kwargs)


_RUNS: dict[str, Callable[..., Any]] = {
    "selective": functools.partial(_run_selectively, _keep_expensive),
    "alternate": functools.partial(_run_selectively, _keep_alternate),
    "offload": _run_offloaded,
}
