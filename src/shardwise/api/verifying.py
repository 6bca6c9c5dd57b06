"""`verify`: proves on a tiny model and gloo ranks that a split computes the same as the unsplit model."""

import copy
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardwise.api.building import parallelize
from shardwise.api.prepare import decide
from shardwise.comm.collectives import all_reduce_
from shardwise.data.batch import count_targets, split_rows, target_names
from shardwise.errors import ConfigError, PlanError, as_error
from shardwise.estimate.cuts import check_pipeline, fewest_microbatches, smallest_schedule
from shardwise.lora.inject import inject_alike, read_adapter_config
from shardwise.loss.label_use import note_label_use
from shardwise.mesh import Mesh
from shardwise.parallel.build import as_dtype, build_meta_model, model_class_of, read_config, take_model_options
from shardwise.plan.options import ParallelSpec, check_kind
from shardwise.probe.label_use import find_label_use
from shardwise.probe.layer_order import find_layer_order
from shardwise.proof import parity
from shardwise.proof.draws import ReplayRandom
from shardwise.ranks.spawn import spawn
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.modes import has_dropout
from shardwise.tiny.inputs import Padding, add_media, has_loss, loss_or_surrogate, missing_media
from shardwise.tiny.models import build_tiny_model, make_batch, set_runnable_mode, shrink_config
from shardwise.topology.shape import DATA_AXES, MeshShape
from shardwise.train.step import TrainStep


def verify(
    source: nn.Module | str | os.PathLike[str] | PreTrainedConfig,
    layout: str | MeshShape = "tp2",
    *,
    auto_class: Any = None,
    num_microbatches: int | None = None,
    dtype: torch.dtype | str | None = None,
    timeout_seconds: float = 300.0,
    adapter: Any = None,
    **options: Any,
) -> parity.Report:
    """Proves on the CPU that a split computes the same as the unsplit model.

    Builds a tiny model (the same architecture, few and narrow layers), trains it unsplit and split over as many gloo
    ranks as the layout has, and compares loss, logits, every gradient, the parameters after three AdamW steps, and the
    replicas of parameters after twenty steps, in float64 (in float32 if the model does not run in float64). A further
    step uses padded rows and dropout; the unsplit model then drops the same elements. Another step in the dtype of the
    run must be as close to the exact gradients as the unsplit model in that dtype. Starts its own ranks; call it from
    one process.

    Args:
        source: a model, a directory, a hub id or a config; only its architecture matters.
        layout: see `Mesh.open`.
        num_microbatches: see `TrainStep`. Default: 1, or the minimum of the pipeline schedule.
        auto_class, dtype: see `load`.
        adapter: see `load`. The tiny model is then frozen except for adapters of this config with random values. A
            model that has adapters is proved with them.
        options: every other option of `load`: plan, sequence_parallel, fsdp, precision, recompute, compilation, and
            values of the config.

    Returns:
        A `Report`: `report.passed`, and `str(report)` as a table.

    Raises:
        ConfigError: there is no such option, or the adapter fits no module of the tiny model.
        UnsupportedError: no tiny model of the architecture can be built.
        PlanError: the plan cannot be applied.
    """
    spec, options = ParallelSpec.take(options)
    torch_dtype, options = take_model_options(options)
    shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
    adapters = {} if adapter is None else {"default": read_adapter_config(adapter)}
    if isinstance(source, nn.Module):
        source = find_model(source)
        adapters = adapters or dict(getattr(source, "peft_config", {}))
        config: Any = getattr(source, "config", None)
        check_kind("the config of a model", config, PreTrainedConfig, fix="pass a model of transformers")
        auto_class = auto_class or type(source)
    elif isinstance(source, PreTrainedConfig):
        config = source
    else:
        config, options = read_config(source, options)
    if options:
        raise ConfigError(f"verify has no option {', '.join(options)}", fix="it takes the options of shardwise.load")
    chosen = as_dtype(torch_dtype if dtype is None else dtype)
    check_pipeline(spec.pipeline, shape, spec.recompute)
    model_class = auto_class or model_class_of(config)
    proof = Proof(
        config=_tiny_config(config, model_class, spec, shape),
        model_class=model_class,
        layout=str(shape),
        spec=spec,
        num_microbatches=fewest_microbatches(spec.pipeline, shape) if num_microbatches is None else num_microbatches,
        drops=has_dropout(source if isinstance(source, nn.Module) else config),
        dtype=None if chosen is None else str(chosen).removeprefix("torch."),
        adapters=adapters,
        with_media=True,
    )
    return proof.run(timeout_seconds=timeout_seconds)


def _tiny_config(config: PreTrainedConfig, model_class: Any, spec: ParallelSpec, shape: MeshShape) -> PreTrainedConfig:
    """Returns the config of the tiny model, with at least one layer per pipeline stage that runs.

    Without images Mllama, for one, skips its cross-attention layers.
    """
    if shape.pp_size == 1:
        return shrink_config(config, without_dropout=True)
    pipeline = spec.pipeline
    if pipeline.layers is not None:  # which are those of the whole model
        return shrink_config(config, without_dropout=True, num_layers=None)
    num_stages = len(smallest_schedule(pipeline, shape.pp_size).rank_of)
    tiny = shrink_config(config, without_dropout=True, num_layers=max(2, num_stages))
    try:
        order = find_layer_order(build_meta_model(copy.deepcopy(tiny), model_class, dtype=None, options={}))
        has_enough = len(order.calls) >= num_stages
    except PlanError:
        has_enough = False
    return tiny if has_enough else shrink_config(config, without_dropout=True, num_layers=None)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Description of a proof, passed to every rank.

    Attributes:
        drops: whether the user's model has dropout. If so, the tiny one is also trained once with dropout.
        dtype: parameter dtype of the second, narrower run; None: that of the spec's precision.
        adapters: PEFT configs by the adapters' names.
        with_media: whether a multimodal model also receives images or sound, if it is known how.
    """

    config: PreTrainedConfig
    model_class: Any
    layout: str
    spec: ParallelSpec = field(default_factory=ParallelSpec)
    num_microbatches: int = 1
    drops: bool = True
    dtype: str | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)
    with_media: bool = False
    tolerance: parity.Tolerance = parity.Tolerance()  # noqa: RUF009 - frozen
    num_steps: int = 20

    def run(self, *, timeout_seconds: float = 300.0) -> parity.Report:
        """Starts the ranks and returns their report."""
        start = time.perf_counter()
        shape = MeshShape.parse(self.layout)
        tiny = build_tiny_model(self.config, self.model_class, seed=0)
        # What does not fit is an error here, before ranks are waited for.
        decide(_inject(self.adapters, tiny) if self.adapters else tiny, shape, self.exact_spec)
        measurements = spawn(_prove_on_this_rank, shape.world_size, self, timeout=timeout_seconds)
        return parity.Report(
            not_given=tuple(missing_media(tiny, self.make_batch(tiny, batch_size=2))),
            subject=f"a tiny {type(tiny).__name__}" + " with adapters" * bool(self.adapters),
            layout=f"{self.layout} with sequence parallelism" if self.spec.sequence_parallel else self.layout,
            measurements=tuple(measurements),
            without_dropout=self._without_dropout(shape),
            seconds=time.perf_counter() - start,
        )

    def make_batch(self, model: Any, *, batch_size: int, padding: Padding = "none") -> dict[str, Tensor]:
        """Returns the batch for the tiny model."""
        batch = make_batch(model, batch_size=batch_size, seed=0, padding=padding)
        return add_media(model, batch, seed=0) if self.with_media else batch

    def _without_dropout(self, shape: MeshShape) -> str:
        """Returns the reason why nothing was dropped in the padded run; "" if dropout was active."""
        if not self.drops:
            return "the model has no dropout"
        if not _draws_in_order(self.spec, shape.pp_size):
            return "a rank of several stages drops in an order of its own"
        return "the tiny model cannot be trained with it, or drops nothing"

    @property
    def exact_spec(self) -> ParallelSpec:
        """The spec without `precision`, so that the model keeps its dtype."""
        return replace(self.spec, precision=None)

    @property
    def run_dtype(self) -> str:
        """Dtype of computation in the run."""
        return self.spec.precision.compute if self.spec.precision is not None else self.dtype or "float32"


def _prove_on_this_rank(proof: Proof) -> parity.Measurement:
    with Mesh.open(proof.layout, device="cpu") as mesh:
        full = build_tiny_model(proof.config, proof.model_class, seed=0)
        if proof.adapters:
            torch.manual_seed(0)
            full = _inject(proof.adapters, full)
        use = find_label_use(full)
        if use is not None:  # whether training teaches it anything is not what is proved
            note_label_use(full, replace(use, sees_target=False))
        batch = proof.make_batch(full, batch_size=max(2, mesh.data_size) * proof.num_microbatches)
        set_runnable_mode(full, batch)
        is_labelled = has_loss(full, batch)
        num_parts = mesh.data_size * (proof.num_microbatches if is_labelled else 1)
        padded = proof.make_batch(full, batch_size=2 * num_parts, padding="right")
        if not is_labelled:  # it takes labels, and computes nothing of them
            batch.pop("labels", None), padded.pop("labels", None)
        exact = copy.deepcopy(full).double() if parity.runs_in_float64(full, batch) else full
        step = functools.partial(_train, num_microbatches=proof.num_microbatches)
        loss_of = functools.partial(_loss_of_parts, num_parts=num_parts)
        found = parity.measure(
            exact,
            parity.in_dtype(batch, exact.dtype),
            mesh,
            split=_splitter(proof.exact_spec),
            step=step,
            reference_loss=loss_of,
            tolerance=proof.tolerance,
            num_steps=proof.num_steps,
        )
        in_training = parity.measure_in_training(
            exact,
            parity.in_dtype(split_rows(padded, 2 * num_parts, 2)[1], exact.dtype),
            mesh,
            split=_splitter(replace(proof.exact_spec, compilation=None)),  # of compiled code nobody sees what it draws
            step=step,
            loss_of=loss_of,
            drops=proof.drops and _draws_in_order(proof.spec, mesh.shape.pp_size),
            tolerance=proof.tolerance,
        )
        found = replace(found, in_training=in_training)
        dtype, split = getattr(torch, proof.run_dtype), _splitter(proof.spec, as_dtype(proof.dtype))
        if exact.dtype is dtype:
            return found
        narrow = parity.measure_narrow(full, exact, batch, mesh, dtype=dtype, split=split, step=step, loss_of=loss_of)
        return replace(found, narrow=narrow)


def _inject(configs: Mapping[str, Any], tiny: nn.Module) -> nn.Module:
    """Adds adapters with random values to the tiny model."""
    large = nn.Module()  # represents the model that has them
    large.__dict__["peft_config"] = configs
    what, fix = f"the adapter does not fit {type(tiny).__name__}", "name modules of this model in target_modules"
    with as_error(ConfigError, what, ValueError, TypeError, AttributeError, fix=fix, limit=400):
        return inject_alike(large, tiny)


def _draws_in_order(spec: ParallelSpec, pp_size: int) -> bool:
    """Whether each rank drops in one microbatch after the other. With several stages per rank this is unknown."""
    return pp_size == 1 or len(smallest_schedule(spec.pipeline, pp_size).rank_of) == pp_size


def _splitter(spec: ParallelSpec, dtype: torch.dtype | None = None) -> Callable[[nn.Module, Mesh], nn.Module]:
    return lambda model, mesh: parallelize(model, mesh, dtype=dtype, **vars(spec))


def _train(model: nn.Module, mesh: Mesh, batch: Mapping[str, Any], *, num_microbatches: int) -> Tensor:
    """Runs forward and backward through the public API; models without a loss get a loss of their output."""
    part = split_rows(batch, _num_rows(batch, mesh.data_size), mesh.data_size)[mesh.data_rank]
    if _has_targets(model, part):
        return TrainStep(model, mesh, num_microbatches=num_microbatches)(part).loss
    loss = loss_or_surrogate(model(**part))
    loss.backward()
    total, group = loss.detach(), mesh.group(*DATA_AXES)
    if group is not None:
        all_reduce_(total, group)
    return total / mesh.data_size


def _loss_of_parts(
    model: nn.Module, batch: Mapping[str, Any], given: Sequence[ReplayRandom] = (), *, num_parts: int
) -> Tensor:
    """Returns the unsplit model's loss of the batch.

    It is the mean of the parts' losses if the loss includes an auxiliary loss of experts, which each microbatch of a
    data rank computes alone, or if the dropout of each data rank is replayed.
    """
    output = {} if given else model(**batch)
    if not given and (num_parts == 1 or not any("aux_loss" in name for name in output)):
        return loss_or_surrogate(output)
    parts = split_rows(batch, _num_rows(batch, num_parts), num_parts)
    counts = [count_targets(model, part) if _has_targets(model, part) else 1 for part in parts]
    losses = []
    for index, (part, count) in enumerate(zip(parts, counts, strict=True)):
        with given[index * len(given) // num_parts] if given else nullcontext():
            losses.append(loss_or_surrogate(model(**part)) * (count / sum(counts)))
    return torch.stack(losses).sum()


def _has_targets(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    return any(name in batch for name in target_names(model))


def _num_rows(batch: Mapping[str, Any], num_parts: int) -> int:
    """Number of rows that divides among the data ranks: the labels' rows, else the smallest number of rows."""
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim]
    return min(size for size in sizes if size % num_parts == 0)
