"""Models and optimizers of a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.api.by_hand import adopt_model, build_in_turns
from shardwise.api.prepare import prepare
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.neuronx_distributed.trainer.model import NxDModel
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.parallel.recompute import recompute_classes
from shardwise.plan.options import FsdpPolicy, ParallelSpec, Recompute
from shardwise.runtime.split_module import SplitModule
from shardwise.train.optimizer import divided_groups

__all__ = ["initialize_parallel_model", "initialize_parallel_optimizer"]


def initialize_parallel_model(
    nxd_config: Mapping[str, Any], model_fn: Callable[..., nn.Module], *model_args: Any, **model_kwargs: Any
) -> NxDModel:
    """Builds a model and splits it as the config says.

    A model with parallel layers is taken as it is written; a transformers model without any is split by its automatic
    plan; any other is replicated over tp.

    Args:
        model_fn: returns the model, the same on every rank. `model_init_config` says how many ranks call it at a time,
            and whether it builds on the meta device.

    Raises:
        PlanError: the model cannot be split.
        UnsupportedError: the config asks for what does not exist yet.

    Communicates: as `shardwise.parallelize`.
    """
    mesh = current_mesh()
    if nxd_config["lora_config"] is not None:
        raise UnsupportedError(
            "lora_config", why="adapters of this API are to come", fix="use peft before model_fn returns"
        )
    if mesh.size("pp") > 1:
        raise UnsupportedError(
            f"pipeline_parallel_size {mesh.size('pp')}",
            why="pipelines of this API are to come",
            fix="use shardwise.parallelize with pipeline=shardwise.Pipeline(...), or pipeline_parallel_size 1",
        )
    options = nxd_config["model_init_config"]
    model = build_in_turns(
        lambda: model_fn(*model_args, **model_kwargs),
        mesh,
        ranks_at_a_time=options["sequential_move_factor"],
        on_meta=options["meta_device_init"],
        fill=options["param_init_fn"],
    )
    recompute = recompute_of(model, nxd_config["activation_checkpoint_config"])
    shards = nxd_config["optimizer_config"]["zero_one_enabled"] and mesh.size("fsdp") > 1
    by_hand = any(isinstance(module, SplitModule) for module in model.modules())
    if by_hand or not isinstance(model, PreTrainedModel):
        adopt_model(model, mesh, policy=FsdpPolicy(zero_stage=1) if shards else None, recompute=recompute)
    else:
        spec = ParallelSpec(
            sequence_parallel=nxd_config["sequence_parallel"] and mesh.size("tp") > 1,
            fsdp=FsdpPolicy(zero_stage=1),
            recompute=recompute,
        )
        prepare(model, mesh, spec)
    return NxDModel(model, nxd_config)


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: type[torch.optim.Optimizer],
    parameters: Iterable[Any],
    **defaults: Any,
) -> NxDOptimizer:
    """An optimizer whose step clips by the norm of the full gradients; with ZeRO-1 its states are sharded over data
    ranks, as the parameters of the model are then.

    Args:
        parameters: of the model, or groups of them.

    Raises:
        ConfigError: there are none.
    """
    defaults.pop("decoupled_weight_decay", None)
    groups = divided_groups(parameters)
    if not groups:
        raise ConfigError("initialize_parallel_optimizer was given no parameter that is trained")
    return NxDOptimizer(optimizer_class(groups, **defaults), nxd_config)


def recompute_of(model: nn.Module, asked: Any) -> Recompute:
    """What `activation_checkpoint_config` means."""
    if asked is None or asked == "full":
        return Recompute(mode=asked or "none")
    classes = tuple(asked) if isinstance(asked, tuple | list | set) else (asked,)
    if not all(isinstance(each, type) for each in classes):
        raise ConfigError(f"activation_checkpoint_config is {asked!r}", fix='use None, "full", or module classes')
    return recompute_classes(model, classes)
