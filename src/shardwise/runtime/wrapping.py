"""Refuses torch's data-parallel wrappers around a model, which would divide the same parameters a second time."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import UnsupportedError

_FIX = (
    'say data parallelism in the layout, such as "fsdp2.tp2" or "ddp2.tp2", and train the model itself with\n'
    "shardwise.TrainStep or a loop of your own (docs/own-loop.md)"
)


def check_unwrapped(model: nn.Module) -> None:
    """Checks a model before it is split.

    Raises:
        UnsupportedError: the model is or holds a data-parallel wrapper of torch, or was made under
            `torch.inference_mode`.
    """
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise UnsupportedError(
            f"a {type(model).__name__} that was made under torch.inference_mode()",
            why="autograd does not accept its parameters",
            fix="make or load it outside, or under torch.no_grad()",
        )
    refuse_wrapped(*model.modules())


def refuse_wrapped(*modules: nn.Module) -> None:
    """Raises `UnsupportedError` if one of the modules is `DistributedDataParallel` or FSDP."""
    for module in modules:
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            wrapper = "DistributedDataParallel" if isinstance(module, DistributedDataParallel) else "FSDP"
            raise UnsupportedError(
                f"a model in {wrapper}",
                why="it assumes equal copies of all parameters on all ranks, or shards them itself",
                fix=_FIX,
            )


def refuse_ddp(*_: Any) -> None:
    """Forward pre-hook of a split model: raises if a `DistributedDataParallel` around the model is running."""
    around = getattr(DistributedDataParallel, "_active_ddp_module", None)  # torch 2.11 to 2.14
    if around is not None:
        refuse_wrapped(around)
