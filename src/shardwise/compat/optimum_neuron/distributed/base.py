"""`Parallelizer`: one for every model."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.api import checkpoints
from shardwise.api.checkpoints import export_pretrained
from shardwise.api.prepare import decide
from shardwise.api.sources import split_lazily
from shardwise.compat.layers.by_hand import split_rewritten
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.optimum_neuron.distributed.utils import move_optimizer
from shardwise.compat.run_batch import add_runners
from shardwise.compat.warned import warn_idle
from shardwise.errors import ConfigError
from shardwise.parallel.facts import read_facts
from shardwise.parameters.registry import registry_of
from shardwise.plan.options import FsdpPolicy, ParallelSpec, Recompute, check_count, check_kind
from shardwise.plan.spec import Plan
from shardwise.runtime.adapter_facts import find_model

__all__ = ["Parallelizer"]

Path = str | os.PathLike[str]
Predicate = Callable[[nn.Module], bool] | None
_TAG = "shards"


class Parallelizer:
    """Splits any model by its automatic plan; subclasses may override `_parallelize`."""

    @classmethod
    def _parallelize(
        cls,
        model: nn.Module,
        device: torch.device | None = None,
        parallelize_embeddings: bool = True,
        sequence_parallel_enabled: bool = False,
        should_parallelize_layer_predicate_func: Predicate = None,
        **parallel_layer_specific_kwargs: Any,
    ) -> nn.Module:
        """Splits the model in place. A subclass may replace modules by parallel layers of `neuronx_distributed`:
        `parallelize` then fills parameters that keep their names with their part of the old weights.

        Args:
            should_parallelize_layer_predicate_func: called with every module that would be split (attention, MLP or
                other), the embedding and the head; modules for which it returns False are replicated.
            parallel_layer_specific_kwargs: those of `parallelize`, for an overridden method.
        """
        options = parallel_layer_specific_kwargs
        inner, mesh = find_model(model), current_mesh()
        spec = ParallelSpec(
            sequence_parallel=sequence_parallel_enabled and mesh.size("tp") > 1,
            fsdp=FsdpPolicy(zero_stage=1),
            recompute=options.get("recompute") or Recompute(),
        )
        rules: dict[str, str] = {}
        if not parallelize_embeddings and mesh.size("tp") > 1:
            facts = read_facts(inner)
            rules |= {name: "replicate" for name in (facts.embedding, facts.head) if name}
        if should_parallelize_layer_predicate_func is not None and mesh.size("tp") > 1:
            plan = decide(inner, mesh.shape, replace(spec, plan=Plan.of(rules)))
            names = dict.fromkeys((*(region.fqn for region in plan.tensor.regions), plan.embedding, plan.tensor.head))
            asked = ((name, inner.get_submodule(name)) for name in names if name)
            whole = [name for name, each in asked if not should_parallelize_layer_predicate_func(each)]
            rules |= {f"{name}.**": "replicate" for name in whole}
            if spec.sequence_parallel:  # attention mixes positions
                rules |= dict.fromkeys(whole, "whole_sequence")
        if rules:
            spec = replace(spec, plan=Plan.of(rules))
        split_lazily(
            model, mesh, spec, checkpoint=options.get("checkpoint_dir"), ranks_at_a_time=options.get("ranks_at_a_time")
        )
        return model

    @classmethod
    def parallelize(
        cls,
        model: nn.Module,
        device: torch.device | None = None,
        parallelize_embeddings: bool = True,
        sequence_parallel_enabled: bool = False,
        kv_size_multiplier: int | None = None,
        pipeline_parallel_input_names: Any = None,
        pipeline_parallel_num_microbatches: int = 1,
        pipeline_parallel_use_zero1_optimizer: bool = False,
        pipeline_parallel_gradient_checkpointing_enabled: bool = False,
        checkpoint_dir: Path | None = None,
        num_local_ranks_per_step: int = 8,
    ) -> nn.Module:
        """Splits the model in place and fills it: with its own values, or those that lazy loading has postponed.

        Args:
            model: a transformers model, or PEFT's around one; real and the same on every rank, or loaded lazily.
            device: only its type is used; each rank has its own device.
            parallelize_embeddings: False replicates embedding and head. Sizes need not divide.
            kv_size_multiplier, pipeline_parallel_input_names, pipeline_parallel_use_zero1_optimizer: no effect.
            pipeline_parallel_num_microbatches: number of microbatches of a forward with gradients, and of `run_train`,
                if rows divide.
            pipeline_parallel_gradient_checkpointing_enabled: recompute blocks, with a pipeline.
            checkpoint_dir: directory of a sharded checkpoint of any degrees, which replaces other weights.
            num_local_ranks_per_step: how many ranks of a machine fill weights at a time; below 1: all.

        Returns: the model itself, with additional methods `run_train` and `run_eval`.

        Raises:
            MeshError: model parallelism is not initialized.
            ConfigError: an argument is not documented.
            PlanError, UnsupportedError: the model cannot be split.
            LoadError: the checkpoint or the weights cannot be read.

        Communicates: like `shardwise.parallelize`, and a gather of a small object per turn of loading.
        """
        mesh = current_mesh()
        check_kind("the model", model, nn.Module, fix="pass the model itself")
        if device is not None and torch.device(device).type != mesh.device.type:
            raise ConfigError(f"device is {device}, but ranks compute on {mesh.device.type}", fix="leave device out")
        check_count("pipeline_parallel_num_microbatches", pipeline_parallel_num_microbatches)
        check_kind("num_local_ranks_per_step", num_local_ranks_per_step, int, fix="use an integer; -1 means all ranks")
        warn_idle(
            "parallelize",
            "ranks hold the key/value heads that they need, stages take all inputs, gradients are averaged once",
            kv_size_multiplier=kv_size_multiplier,
            pipeline_parallel_input_names=pipeline_parallel_input_names,
            pipeline_parallel_use_zero1_optimizer=pipeline_parallel_use_zero1_optimizer,
        )
        recomputes = pipeline_parallel_gradient_checkpointing_enabled and mesh.size("pp") > 1
        given: dict[str, Any] = {
            "device": mesh.device,
            "parallelize_embeddings": parallelize_embeddings,
            "sequence_parallel_enabled": sequence_parallel_enabled,
            "should_parallelize_layer_predicate_func": None,
            "kv_size_multiplier": kv_size_multiplier,
            "recompute": Recompute(mode="full" if recomputes else "none"),
            "checkpoint_dir": checkpoint_dir,
            "ranks_at_a_time": num_local_ranks_per_step,
        }
        if cls._parallelize.__func__ is Parallelizer._parallelize.__func__:  # type: ignore[attr-defined]
            model = cls._parallelize(model, **given)
        else:
            taken = inspect.signature(cls._parallelize).parameters
            if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in taken.values()):
                given = {name: value for name, value in given.items() if name in taken}
            model = split_rewritten(
                model,
                mesh,
                functools.partial(cls._parallelize, model, **given),
                checkpoint=checkpoint_dir,
                ranks_at_a_time=num_local_ranks_per_step,
            )
        add_runners(model, num_microbatches=pipeline_parallel_num_microbatches)
        return model

    @classmethod
    def optimizer_for_mp(
        cls, optimizer: torch.optim.Optimizer, orig_param_to_parallel_param_on_xla: Mapping[int, nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Returns the optimizer over the split model's parameters. A lazy optimizer is created as requested; any other
        keeps its class, options, groups and state.

        Raises:
            ConfigError: the mapping lacks parameters of the optimizer that belong to no other stage.
            UnsupportedError: the optimizer does not update parts of parameters like full ones.
        """
        return move_optimizer(optimizer, orig_param_to_parallel_param_on_xla)

    @classmethod
    def save_model_sharded_checkpoint(
        cls,
        model: nn.Module,
        output_dir: Path,
        optimizer: torch.optim.Optimizer | None = None,
        use_xser: bool = True,
        async_save: bool = False,
        num_local_ranks_per_step: int = 8,
    ) -> None:
        """Saves the model, and the optimizer, to `output_dir/shards`, for any degrees; see `shardwise.save_checkpoint`.

        Args:
            use_xser, num_local_ranks_per_step: no effect: ranks stream tensor by tensor.
            async_save: return when everything is copied to host memory.
        """
        warn_idle(
            "save_model_sharded_checkpoint",
            "ranks stream tensor by tensor",
            use_xser=not use_xser,
            num_local_ranks_per_step=num_local_ranks_per_step != 8,
        )
        checkpoints.save_checkpoint(output_dir, model=model, optimizer=optimizer, tag=_TAG, async_save=async_save)

    @classmethod
    def load_model_sharded_checkpoint(cls, model: nn.Module, load_dir: Path) -> None:
        """Loads the model of a sharded checkpoint of any degrees; see `shardwise.load_checkpoint`."""
        cls.load_sharded_checkpoint(load_dir, model)

    @classmethod
    def load_sharded_checkpoint(
        cls, load_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Runs `load_model_sharded_checkpoint`, and loads the optimizer too."""
        registry_of(model)
        checkpoints.load_checkpoint(load_dir, model=model, optimizer=optimizer)

    @classmethod
    def save_model_checkpoint(
        cls,
        model: nn.Module,
        output_dir: Path,
        as_regular: bool = False,
        as_sharded: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Saves the model for `from_pretrained` (`as_regular`), as a sharded checkpoint, or both.

        Raises:
            ConfigError: neither is requested, or an optimizer would not be saved.
        """
        if (optimizer is not None or not as_regular) and not as_sharded:
            raise ConfigError(
                "save_model_checkpoint with as_sharded=False", fix="use as_sharded=True, for an optimizer"
            )
        if as_regular:
            export_pretrained(model, output_dir)
        if as_sharded:
            cls.save_model_sharded_checkpoint(model, output_dir, optimizer=optimizer)

    load_model_checkpoint = load_model_sharded_checkpoint
