"""`load` and `parallelize`: a transformers model in its split form."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.checkpoints import fill_model, holds_all
from shardwise.api.prepare import check_options, fingerprint, prepare
from shardwise.api.sources import SAME_FILES, Place, WeightSource, build_meta
from shardwise.checkpoint.stored import StoredParts
from shardwise.comm.agree import agree_on
from shardwise.errors import LoadError, UnsupportedError
from shardwise.lora.files import load_adapter_weights
from shardwise.mesh import Mesh
from shardwise.parallel.build import as_dtype, take_model_options
from shardwise.plan.options import Compile, FsdpPolicy, ParallelSpec, Pipeline, Precision, Recompute, check_kind
from shardwise.plan.spec import Plan
from shardwise.weights.locate import ADAPTER_CONFIG, check_no_checkpoint

_OPEN = 'open one: with shardwise.Mesh.open("fsdp2.tp2") as mesh'


def load(  # noqa: PLR0913 - the public surface: each is a choice of the user's
    source: Place | PreTrainedConfig,
    mesh: Mesh,
    *,
    auto_class: Any = None,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    fsdp: FsdpPolicy | None = None,
    precision: Precision | None = None,
    recompute: Recompute | None = None,
    compilation: Compile | None = None,
    pipeline: Pipeline | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    adapter: Any = None,
    **options: Any,
) -> Any:
    """Loads a model into its split form. Each rank reads only its parts of the weights.

    Args:
        source: a directory that `save_pretrained` wrote, a hub id, or a config whose weights are initialized at random.
        auto_class: any transformers auto class or model class. Default: the class in the config's `architectures`, else
            `AutoModelForCausalLM`. A checkpoint whose config names no class must not hold further modules (an encoder),
            unless `allow_unused` names them.
        plan, sequence_parallel, fsdp, precision, recompute, compilation, pipeline: see `parallelize`.
        dtype: dtype to which floating-point weights are converted. Default: `precision.params`; without `precision` the
            config's dtype, else the checkpoint's.
        seed: seed of values that no checkpoint holds. They depend only on the seed, not on the layout.
        adapter: a PEFT config, such as `peft.LoraConfig`, of a new adapter, or the directory or hub id of a saved one.
            The base is frozen, and the adapter is trained.
        options: passed to the hub (`revision`, `token`, …), to the config (its attributes) and to the model class
            (`attn_implementation`, …). `ignore_mismatched_sizes` and `key_mapping`: see `from_pretrained`.
            `torch_dtype` is another name of `dtype`. `device_map`, `quantization_config` and `tp_plan` are refused.
            `allow_missing`: patterns of parameters that the checkpoint may lack (they are initialized). `allow_unused`:
            patterns of its tensors that belong to layers the model does not have. True allows all.

    Returns:
        The split model on the mesh's device, in eval mode like `from_pretrained`, or PEFT's model around it.

    Raises:
        ConfigError: the adapter fits no module of the model, or `peft` is not installed.
        LoadError: files or tensors are missing or damaged, or do not fit the model. The same on every rank.
        PlanError: the plan cannot be applied.
        RankError: ranks see different files, or have different seeds or options; names the first difference.
        UnsupportedError: the class does not support the config, the checkpoint is quantized, an option is one of
            another way to split or store a model (`device_map`, `load_in_4bit`), or the adapter's initial values are
            computed from full weights (PiSSA, DoRA).

    Communicates: a few gathers of small objects over all ranks, to compare models and to raise errors on all ranks.
    """
    spec, _ = ParallelSpec.take(locals())
    torch_dtype, options = take_model_options(options)
    dtype = torch_dtype if dtype is None else dtype
    if dtype is None and precision is not None:
        dtype = precision.params
    return load_by_spec(
        source, mesh, spec, auto_class=auto_class, dtype=dtype, seed=seed, adapter=adapter, options=options
    )


def load_by_spec(  # noqa: PLR0913 - what `load` takes
    source: Place | PreTrainedConfig,
    mesh: Mesh,
    spec: ParallelSpec,
    *,
    auto_class: Any = None,
    dtype: torch.dtype | str | None,
    seed: int,
    adapter: Any,
    config: PreTrainedConfig | None = None,
    checkpoint: StoredParts | None = None,
    options: dict[str, Any],
) -> Any:
    """Runs `load` with a `ParallelSpec`.

    Args:
        config: replaces the config at `source`.
        checkpoint: an open checkpoint on every rank, whose values replace those of `source`; None: there is none.

    Communicates: like `load`, and with `checkpoint` like `load_checkpoint`.
    """
    check_kind("the mesh of a model", mesh, Mesh, fix=_OPEN)
    check_options(mesh.shape, spec)
    reads = checkpoint is None or not holds_all(checkpoint)

    def build() -> tuple[tuple[PreTrainedModel, WeightSource, Any], dict[str, str]]:
        _check_source(source, adapter, options)
        model, values = build_meta(source, auto_class, config=config, dtype=dtype, options=options, reads=reads)
        wrapped: Any = model if adapter is None else values.inject(model, adapter)
        settings = model.generation_config.to_dict() if getattr(model, "generation_config", None) is not None else {}
        generation = {f"the generation config's {key}": repr(value) for key, value in settings.items()}
        return (model, values, wrapped), {"the seed": str(seed), **generation, **values.describe()}

    model, values, wrapped = agree_on(mesh.group(), build, doing="building the model", **SAME_FILES)
    registry = prepare(wrapped, mesh, spec)

    def load_values() -> tuple[None, dict[str, str]]:
        values.fill(model, registry, seed=seed)
        is_path = isinstance(adapter, str | os.PathLike)
        read = load_adapter_weights(wrapped, adapter) if is_path and reads else {}  # else the checkpoint has them
        return None, {f"the adapter's {key}": fingerprint(value) for key, value in read.items()}

    fill_model(wrapped, checkpoint, lambda: agree_on(mesh.group(), load_values, doing="loading", **SAME_FILES))
    values.close()
    return wrapped


def _check_source(source: Any, adapter: Any, options: Mapping[str, Any]) -> None:
    """Raises if no model can be loaded from `source`, or if it holds an adapter and `adapter` is None."""
    if isinstance(adapter, str | os.PathLike):
        check_no_checkpoint(adapter, what="an adapter")
    if isinstance(source, PreTrainedConfig):
        return
    fix = "pass a directory, a hub id or a config; shardwise.parallelize(model, mesh) splits a model that is there"
    check_kind("what a model is loaded from", source, str | os.PathLike, fix=fix)
    directory = Path(source) / (options.get("subfolder") or "")
    check_no_checkpoint(directory)
    if adapter is None and os.path.isfile(directory / ADAPTER_CONFIG):  # noqa: PTH113 - pathlib raises: a name too long
        raise LoadError(
            f"{os.fspath(source)!r} holds an adapter of PEFT, which from_pretrained adds to the model",
            at=str(directory / ADAPTER_CONFIG),
            fix="to train it, pass its directory as adapter=; to load its base alone, that one's own directory",
        )


def parallelize(  # noqa: PLR0913 - as above
    model: nn.Module,
    mesh: Mesh,
    *,
    plan: str | Plan | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    fsdp: FsdpPolicy | None = None,
    precision: Precision | None = None,
    recompute: Recompute | None = None,
    compilation: Compile | None = None,
    pipeline: Pipeline | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Splits an existing transformers model over `mesh`, in place. Parameter names stay.

    Args:
        model: a real model, the same on every rank, or a meta model whose weights are loaded afterwards. PEFT adapters
            (LoRA) in or around it are split like the modules that they adapt.
        plan: "auto" (corrections for the model family on the model's own plan), or rules on top of it: a dictionary of
            pattern to style, or a `Plan`.
        sequence_parallel: also split the hidden states between blocks along the sequence. Saves memory; the same bytes.
        fsdp: how the `fsdp` and `ddp` axes shard parameters, gradients and optimizer states; see `FsdpPolicy`.
        precision: dtypes of parameters, computation and gradient reduction; see `Precision`.
        recompute: activation checkpointing; see `Recompute`.
        compilation: `torch.compile` of every block; see `Compile`.
        pipeline: how layers are divided into stages along `pp`, and the schedule; see `Pipeline`.
        dtype: dtype to which the parameters are converted. Default: `precision.params`, else their own.

    Returns:
        `model` itself, on the mesh's device unless it is meta.

    Raises:
        PlanError: the plan cannot be applied; lists every problem, with the sizes that work.
        RankError: the ranks' models or options differ; names the first difference.
        UnsupportedError: the layout or the model needs a feature that is not implemented.

    Communicates: a few gathers of small objects over all ranks, to compare models and options.
    """
    spec, _ = ParallelSpec.take(locals())
    check_kind("the model", model, nn.Module, fix="pass a model; shardwise.load takes a directory or a hub id")
    check_kind("the mesh of a model", mesh, Mesh, fix=_OPEN)
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        fix = "split it first: torch.compile(shardwise.parallelize(model, mesh))"
        raise UnsupportedError("splitting a model that is compiled already", fix=fix)
    if dtype is None and precision is not None:
        dtype = as_dtype(precision.params)
    prepare(model, mesh, spec, dtype=dtype)
    return model
