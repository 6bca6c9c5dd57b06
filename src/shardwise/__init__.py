"""Shardwise: train and run any Hugging Face model on many devices.

The names below are the whole public surface; each is documented where it is defined. They are imported when first used,
so that `import shardwise` and the torch-free rooms cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.versions import __version__ as __version__
from shardwise.versions import warn_if_untested

if TYPE_CHECKING:
    from shardwise.api.building import load as load
    from shardwise.api.building import parallelize as parallelize
    from shardwise.api.checkpoints import export_pretrained as export_pretrained
    from shardwise.api.checkpoints import full_gradients as full_gradients
    from shardwise.api.checkpoints import full_state_dict as full_state_dict
    from shardwise.api.checkpoints import load_checkpoint as load_checkpoint
    from shardwise.api.checkpoints import save_checkpoint as save_checkpoint
    from shardwise.api.verifying import verify as verify
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.mesh import Mesh as Mesh
    from shardwise.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from shardwise.optim.optimizer import build_optimizer as build_optimizer
    from shardwise.plan.options import Compile as Compile
    from shardwise.plan.options import FsdpPolicy as FsdpPolicy
    from shardwise.plan.options import Pipeline as Pipeline
    from shardwise.plan.options import Precision as Precision
    from shardwise.plan.options import Recompute as Recompute
    from shardwise.plan.spec import Plan as Plan
    from shardwise.topology.shape import MeshShape as MeshShape
    from shardwise.train.step import TrainStep as TrainStep

_HOMES = {
    "Compile": "plan.options",
    "FsdpPolicy": "plan.options",
    "Mesh": "mesh",
    "MeshShape": "topology.shape",
    "Pipeline": "plan.options",
    "Plan": "plan.spec",
    "Precision": "plan.options",
    "Recompute": "plan.options",
    "ShardwiseError": "errors",
    "TrainStep": "train.step",
    "build_optimizer": "optim.optimizer",
    "clip_grad_norm_": "optim.clip",
    "export_pretrained": "api.checkpoints",
    "full_gradients": "api.checkpoints",
    "full_state_dict": "api.checkpoints",
    "load": "api.building",
    "load_checkpoint": "api.checkpoints",
    "parallelize": "api.building",
    "save_checkpoint": "api.checkpoints",
    "verify": "api.verifying",
}

__all__ = [
    "Compile",
    "FsdpPolicy",
    "Mesh",
    "MeshShape",
    "Pipeline",
    "Plan",
    "Precision",
    "Recompute",
    "ShardwiseError",
    "TrainStep",
    "build_optimizer",
    "clip_grad_norm_",
    "export_pretrained",
    "full_gradients",
    "full_state_dict",
    "load",
    "load_checkpoint",
    "parallelize",
    "save_checkpoint",
    "verify",
]


warn_if_untested()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
