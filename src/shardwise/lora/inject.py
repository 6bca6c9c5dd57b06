"""Adapters of PEFT in a split model: checks, adds them to the meta model, wraps the split modules."""

import copy
import importlib
import os
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError, LoadError, PlanError, UnsupportedError, as_error, did_you_mean
from shardwise.parameters.canonical import names_only
from shardwise.parameters.registry import Registry, forget_unreduced, reshard
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import check_kind
from shardwise.runtime.adapter_facts import find_model, is_adapter, is_saved_copy, unwrapped
from shardwise.runtime.linear import apply_mixin
from shardwise.topology.shape import MeshShape
from shardwise.weights.locate import locate_source

_BY_ENTRY = ("linear", "cat")  # combine entries of A or B with the same entries of others


def guard_wrapper(model: nn.Module, registry: Registry) -> None:
    """Corrects the methods of PEFT's wrapper that would be wrong when ranks hold parts, or makes them raise.

    Communicates: nothing.
    """
    if find_model(model) is not model and registry.mesh.shape.world_size > 1:
        apply_mixin(model, _SplitWrapper, _split_registry=registry)
        apply_mixin(model.get_submodule("base_model"), _SplitTuner, _split_registry=registry)


def named_biases(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Returns the biases that an adapter's config trains and that PEFT misses: modules list them in `bias_names`."""
    kind = getattr(config, "bias", "none")
    return {
        f"{name}.{bias}": module.get_parameter(bias)
        for name, module in model.named_modules()
        if kind == "all" or (kind == "lora_only" and name.endswith(".base_layer"))
        for bias in getattr(module, "bias_names", ())
        if getattr(module, bias, None) is not None
    }


class _SplitWrapper:
    """Mixin of a `PeftModel`."""

    _split_registry: Registry

    def load_adapter(self, *args: Any, **options: Any) -> Any:
        """Like PEFT; each rank keeps its part of the file's tensors."""
        with names_only(self._split_registry):
            return super().load_adapter(*args, **options)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **options: Any) -> NoReturn:
        """Raises: PEFT would write a rank's parts as if they were full tensors."""
        raise UnsupportedError(
            "save_pretrained of adapters in a split model",
            why="this rank holds parts of its parameters, and other ranks may not have called",
            fix="call shardwise.export_pretrained(model, directory) on every rank: it writes the same files",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Like torch, for sharded parameters and unreduced gradients; see [Note: left gathered]."""
        inner: Any = find_model(self)  # type: ignore[arg-type]
        reshard(inner)
        forget_unreduced(inner)
        super().zero_grad(set_to_none)  # type: ignore[misc]


class _SplitTuner:
    """Mixin of a `LoraModel`."""

    _split_registry: Registry

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        *args: Any,
        **options: Any,
    ) -> Any:
        """Like PEFT, if the combination of parts is the part of the combination."""
        mesh = self._split_registry.mesh
        if mesh.size("pp") > 1 or mesh.data_size > 1 or combination_type not in _BY_ENTRY:
            raise UnsupportedError(
                f"adapters combined by {combination_type!r} in a model that is split over {mesh.shape}",
                why="it is computed from full tensors, of which each rank holds a part",
                fix="combine them in the unsplit model, and load what it saves; over tp alone use "
                + " or ".join(f"combination_type={each!r}" for each in _BY_ENTRY),
            )
        return super().add_weighted_adapter(  # type: ignore[misc]
            adapters, weights, adapter_name, combination_type, *args, **options
        )


def peft() -> Any:
    """Returns the library."""
    with as_error(
        ConfigError, "adapters need peft, which cannot be imported", ImportError, fix="pip install 'peft>=0.21'"
    ):
        return importlib.import_module("peft")


def read_adapter_config(adapter: Any) -> Any:
    """Returns the config of an adapter to train: a copy of the given one, or that of an adapter's directory.

    Args:
        adapter: a PEFT config, a directory that PEFT or Shardwise wrote, or a hub id.
    """
    library = peft()
    if isinstance(adapter, library.PeftConfig):
        return copy.deepcopy(adapter)
    if not isinstance(adapter, str | os.PathLike):
        raise ConfigError(
            f"an adapter cannot be a {type(adapter).__name__}",
            fix="pass a peft.LoraConfig, or the directory of an adapter",
        )
    place = os.fspath(adapter)
    if Path(place).is_dir() and not (Path(place) / "adapter_config.json").is_file():
        raise LoadError(f"no adapter in {place!r}", why="the directory has no adapter_config.json")
    locate_source(place)  # PEFT would ask a hub that does not answer for a minute
    # A missing repository, a damaged file, values that its class refuses.
    with as_error(LoadError, f"no adapter config at {place!r}", limit=300):
        config = library.PeftConfig.from_pretrained(place)
    config.inference_mode = False
    return config


def inject(model: nn.Module, adapter: Any, *, on_meta: bool = True) -> nn.Module:
    """Wraps an unsplit model in PEFT's model, with the adapter's modules.

    Args:
        model: a meta model; or a real one, the same on every rank, with equal random states.
        on_meta: whether the adapter has no values yet.
    """
    config = read_adapter_config(adapter)
    if on_meta:
        _check_init(config, from_file=isinstance(adapter, str | os.PathLike))
    foreign = (ValueError, TypeError, RuntimeError, AttributeError, re.error)
    what, fix = f"the adapter does not fit {type(model).__name__}", "name modules of this model in target_modules"
    with (
        as_error(ConfigError, what, *foreign, at="adapter", fix=fix, limit=400),
        torch.device("meta") if on_meta else nullcontext(),
        warnings.catch_warnings(),
    ):
        # PEFT 0.21 asks transformers by a name that is on its way out.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        wrapped: nn.Module = peft().get_peft_model(model, config)
    for bias in named_biases(wrapped, config).values():
        bias.requires_grad_()
    return wrapped.eval()


def named_targets(model: nn.Module, keywords: Any) -> Any:
    """Returns `target_modules` in PEFT's form, which requires full names or their ends: all modules whose name contains
    a keyword.

    Args:
        keywords: a list of keywords; a string (a pattern of full names) and None are returned unchanged.
    """
    if keywords is None or isinstance(keywords, str):
        return keywords
    check_kind("target_modules", keywords, list | tuple | set | frozenset, fix="use a list of names")
    names = [name for name, each in model.named_modules() if name and not any(each.children())]
    fitting = [name for name in names if any(keyword in name for keyword in keywords)]
    idle = [keyword for keyword in keywords if not any(keyword in name for name in fitting)]
    if idle:
        ends = sorted({name.rpartition(".")[2] for name in names})
        raise ConfigError(
            f"target_modules: no module's name includes {idle[0]!r}{did_you_mean(idle[0], ends)}",
            fix=f"use some of {', '.join(ends)}",
        )
    by_end = [name for name in names if any(f".{name}".endswith(f".{each}") for each in keywords)]
    return list(keywords) if by_end == fitting else fitting


def inject_alike(model: nn.Module, other: nn.Module, *, fresh_values: bool = False) -> nn.Module:
    """Adds the adapters of `model` to `other`, of the same architecture, with random or `fresh_values`."""
    library = peft()
    for name, given in getattr(model, "peft_config", {}).items():
        config = copy.deepcopy(given)
        config.inference_mode = False
        if not fresh_values:
            config.init_lora_weights = False
        if not fresh_values and getattr(config, "layers_to_transform", None) is not None:
            config.layers_to_transform = config.layers_pattern = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = library.inject_adapter_in_model(config, other, adapter_name=name)
    return other.eval()


def _check_init(config: Any, *, from_file: bool) -> None:
    init = getattr(config, "init_lora_weights", True)
    needs = "use_dora" if getattr(config, "use_dora", False) else ""
    if not from_file and init not in (True, False, "gaussian", "orthogonal"):
        needs = f"init_lora_weights={init!r}"
    if config.is_prompt_learning:
        needs = f"prompts ({getattr(config.peft_type, 'value', config.peft_type)})"
    if needs:
        raise UnsupportedError(
            f"an adapter with {needs}, loaded into a split model",
            why="it is made of full weights, or beside them, and each rank reads its part of the files",
            fix="give shardwise.parallelize a model that has it, peft.get_peft_model(model, config), on every rank",
        )


_OF_HEADS = ("PREFIX_TUNING", "CARTRIDGE")  # kinds of prompts, in PEFT's words, that are keys and values of every head


def check_adapters(model: nn.Module, shape: MeshShape) -> None:
    """Checks that adapters of different weights share no parameters, because stages and FSDP2 units hold their own."""
    owners: dict[int, tuple[str, set[int]]] = {}
    for fqn, module in model.named_modules() if shape.world_size > 1 else ():
        if not is_adapter(module) or is_saved_copy(module):
            continue
        wrapper: Any = module
        base = {id(value) for value in unwrapped(module).parameters()}
        own = [id(value) for value in module.parameters() if id(value) not in base]
        other = next((owners[each][0] for each in own if each in owners and not base & owners[each][1]), None)
        if other is not None or getattr(wrapper, "kwargs", {}).get("tied_adapter"):
            raise PlanError(
                f"the adapter on {fqn} cannot be divided over {shape}",
                why=f"its parameters are those of the adapter on {other or 'the embedding'} too",
                fix="use adapters that have their own (LoraConfig without ensure_weight_tying), or one process",
            )
        owners |= dict.fromkeys(own, (fqn, base))


def check_prompts(model: nn.Module, plan: SplitPlan) -> None:
    """Checks that every rank can compute alike what PEFT's wrapper computes before the model."""
    configs = getattr(model, "peft_config", {}).values() if find_model(model) is not model else ()
    kinds = [str(getattr(each.peft_type, "value", each.peft_type)) for each in configs if each.is_prompt_learning]
    if kinds and plan.pipeline is not None:
        raise PlanError(
            f"a model with prompts of PEFT's ({kinds[0]}) cannot be cut into stages",
            why="they are computed before the model, from its embedding, and their stage is unknown",
            fix="use tp or fsdp instead of pp",
        )
    if plan.num_parts > 1 and plan.tensor.heads and (found := [each for each in kinds if each in _OF_HEADS]):
        raise PlanError(
            f"a model with prompts of PEFT's ({found[0]}) cannot be split over tp={plan.num_parts}",
            why="they are keys and values of all heads, of which a rank has some",
            fix="use fsdp instead of tp, or prompts that are embeddings (PromptTuningConfig)",
        )
