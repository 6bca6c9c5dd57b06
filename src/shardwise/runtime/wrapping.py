"""Wrappers of torch that would take a split model for a copy of the unsplit one: refused before they change it.

# [Note: where wrappers look]
`DistributedDataParallel` makes every rank's parameters those of rank 0, and FSDP shards them again as if all ranks held
the same. Neither asks a model whether it may. But each does something of its own first, and finds an error there: DDP
puts the module, which may hold the split model, into itself, `fully_shard` reads the list of what has been applied to
the module, FSDP1 a mark on every parameter. Inside a wrapper's module, `fully_shard` leaves a model alone that
"replicate" has been applied to, and so ours. accelerate's `prepare` and transformers' `Trainer` end in one of these.

A DDP of the model itself, made before the split, leaves no mark on it but that the nodes which accumulate its gradients
live on, with the shapes of full parameters: every later backward would end in torch's error about them.
"""

from __future__ import annotations

import functools
import gc
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import UnsupportedError

__all__ = ["check_unwrapped", "refuse_flattening", "refuse_wrapping"]

_FLATTENED = "_fsdp_flattened"

_REMEDY = (
    'say data parallelism in the layout, such as "fsdp2.tp2" or "ddp2.tp2", and train with\n'
    "shardwise.TrainStep or a loop of your own (docs/own-loop.md)"
)


def check_unwrapped(model: nn.Module) -> None:
    """Raises `UnsupportedError` where a model that is to be split is, or holds, one that torch has wrapped, or was made
    under `torch.inference_mode`.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UnsupportedError(
            f"a {type(model).__name__} that was made under torch.inference_mode()",
            why="autograd takes none of its parameters",
            fix="make or load it outside, or under torch.no_grad()",
        )
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            kind = "DistributedDataParallel" if isinstance(module, DistributedDataParallel) else "FSDP"
            raise UnsupportedError(
                f"a model in {kind} cannot be split",
                why="its parameters are the wrapper's already",
                fix=f"split the model itself, and take {kind} away: {_REMEDY}",
            )
    if any(_accumulates(parameter) for parameter in model.parameters()) and _is_in_ddp(model):
        raise UnsupportedError(
            "a model that a DistributedDataParallel was made of cannot be split",
            why="it is still there, and expects gradients of full parameters",
            fix=f"do not make it, or delete it before the split: {_REMEDY}",
        )


def _accumulates(parameter: nn.Parameter) -> bool:
    """Whether something keeps the node that accumulates a parameter's gradient: a graph, or DDP."""
    if not parameter.requires_grad or not parameter.is_leaf:
        return False
    with torch.enable_grad():
        _accumulator(parameter)["shardwise"] = True  # kept with the node
        return bool(_accumulator(parameter).pop("shardwise", False))


def _accumulator(parameter: nn.Parameter) -> dict[str, Any]:
    grad_fn = parameter.view_as(parameter).grad_fn
    assert grad_fn is not None, "it requires a gradient"
    return cast(dict[str, Any], grad_fn.next_functions[0][0].metadata)  # type: ignore[union-attr]  # it has one


def _is_in_ddp(model: nn.Module) -> bool:
    """Whether a DDP that is alive holds parameters of the model."""
    wrappers = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    mine = set(map(id, model.parameters()))
    return any(not mine.isdisjoint(map(id, wrapper.parameters())) for wrapper in wrappers)


def refuse_wrapping(model: nn.Module) -> None:
    """Makes it an error to wrap a split model, or a part of it, in DDP or FSDP. Comes after our own use of them."""
    for module in model.modules():
        module.__dict__[REGISTRY_KEY] = _Applied(module.__dict__.get(REGISTRY_KEY, {}))
    _watch_registrations()


@functools.cache
def _watch_registrations() -> None:
    """Has DDP, in this process, refuse modules with parameters of a split model."""
    register_module_module_registration_hook(_check_parent)


def _check_parent(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if isinstance(parent, DistributedDataParallel) and isinstance(module, nn.Module):
        found = (each.__dict__.get(REGISTRY_KEY) for each in module.modules())
        if any(isinstance(each, _Applied) for each in found):
            raise _refused("DistributedDataParallel")


def refuse_flattening(parameter: Tensor) -> None:
    """Makes it an error that FSDP1 takes a parameter."""
    setattr(parameter, _FLATTENED, _Refusal())


class _Refusal:
    """An answer that cannot be read."""

    def __bool__(self) -> bool:
        raise _refused("FSDP")


class _Applied(dict[str, Any]):
    """The APIs that have been applied to a module."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise _refused("FSDP")
        return name == "replicate" or super().__contains__(name)


def _refused(wrapper: str) -> UnsupportedError:
    return UnsupportedError(
        f"{wrapper} over a model that Shardwise has split",
        why="it takes the ranks' parameters for copies of one another, which they are not, and overwrites them\n"
        "(accelerate.prepare and transformers.Trainer wrap a model by themselves where there are several ranks)",
        fix=_REMEDY,
    )
