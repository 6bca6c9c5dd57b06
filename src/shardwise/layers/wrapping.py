"""Wrappers of torch that would take a split model for a copy of the unsplit one: refused before they change it.

# [Note: where wrappers look]
`DistributedDataParallel` makes every rank's parameters those of rank 0, and FSDP shards them again as if all ranks held
the same. Neither asks a model whether it may. But each reads something of its own first, and finds an error there: DDP
the names that the module wants ignored, `fully_shard` the list of what has been applied to the module, FSDP1 a mark on
every parameter. Inside a wrapper's module, `fully_shard` leaves a model alone that "replicate" has been applied to, and
so ours. What DDP is given inside of another module it overwrites, and only the first forward can tell.
accelerate's `prepare` and transformers' `Trainer` end in one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import UnsupportedError

__all__ = ["refuse_flattening", "refuse_wrapping"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_FLATTENED = "_fsdp_flattened"


def refuse_wrapping(model: nn.Module) -> None:
    """Makes it an error to wrap a split model, or a part of it, in DDP or FSDP. Comes after our own use of them."""
    for module in model.modules():
        module.__dict__[_IGNORED] = _Refusal("DistributedDataParallel")
        module.__dict__[REGISTRY_KEY] = _Applied(module.__dict__.get(REGISTRY_KEY, {}))
    model.register_forward_pre_hook(_check_caller, prepend=True)


def refuse_flattening(parameter: Tensor) -> None:
    """Makes it an error that FSDP1 takes a parameter."""
    setattr(parameter, _FLATTENED, _Refusal("FSDP"))


class _Refusal:
    """An answer that cannot be read."""

    def __init__(self, wrapper: str) -> None:
        self.wrapper = wrapper

    def __iter__(self) -> Iterator[str]:
        raise _refused(self.wrapper)

    def __bool__(self) -> bool:
        raise _refused(self.wrapper)


class _Applied(dict[str, Any]):
    """The APIs that have been applied to a module."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise _refused("FSDP")
        return name == "replicate" or super().__contains__(name)


def _check_caller(module: nn.Module, args: Any) -> None:
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is not None and any(each is module for each in wrapper.module.modules()):
        raise _refused("DistributedDataParallel")


def _refused(wrapper: str) -> UnsupportedError:
    return UnsupportedError(
        f"{wrapper} over a model that Shardwise has split",
        why="it takes the ranks' parameters for copies of one another, which they are not, and overwrites them\n"
        "(accelerate.prepare and transformers.Trainer wrap a model by themselves where there are several ranks)",
        fix='say data parallelism in the layout, such as "fsdp2.tp2" or "ddp2.tp2", and train with\n'
        "shardwise.TrainStep or a loop of your own (docs/own-loop.md)",
    )
