"""Parameters of a split model as they are stored between steps."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.parameters.registry import registry_of, walk_modules
from shardwise.runtime.fsdp_internals import drop_unreduced, free


def reshard(model: nn.Module) -> None:
    """Makes FSDP2 free parameters that a forward without backward has left gathered. `parameters()` then lists the
    sharded ones.
    """
    for root in (model, *registry_of(model).stage_roots.values()):
        for module in walk_modules(root).modules:
            if isinstance(module, FSDPModule):
                free(module)


def forget_unreduced(model: nn.Module) -> None:
    """Drops gradients that FSDP2 keeps for a later backward to reduce. They are in no `.grad`."""
    for root in (model, *registry_of(model).stage_roots.values()):
        drop_unreduced(root)
