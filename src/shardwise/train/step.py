"""One training step, forward and backward, for every layout."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.comm.agree import compare_later, raise_on_all_ranks
from shardwise.comm.operations import all_reduce_, host_device
from shardwise.data.ahead import SentBatch, send
from shardwise.data.batch import (
    check_batch,
    count_each_target,
    count_targets,
    flops_of,
    make_up_targets,
    split_rows,
    target_names,
)
from shardwise.errors import BatchError, GradientError, ShardwiseError, UnsupportedError
from shardwise.loss.deferred_logits import dropped_output
from shardwise.loss.label_use import check_label_use
from shardwise.loss.shares import check_shares, share_targets
from shardwise.mesh import Mesh
from shardwise.optim.gradients import gradients_of
from shardwise.optim.late import Late
from shardwise.optim.summing import multiply_gradients, time_reduction
from shardwise.parameters.local_parameter import hidden
from shardwise.parameters.registry import registry_of
from shardwise.pipeline.outputs import check_asked_outputs
from shardwise.pipeline.runner import PipelineRunner, runner_of
from shardwise.pipeline.stage import Microbatch
from shardwise.runtime.adapters import find_model
from shardwise.runtime.attention_kernels import drop_kernels, take_kernels
from shardwise.runtime.own_attention import missed_rows, own_rows, take_own_attention
from shardwise.runtime.same_batch import (
    check_same_batch,
    check_same_call,
    compared_already,
    describe_call,
    words_of,
)
from shardwise.schedule.schedule import Schedule
from shardwise.topology.axes import DATA_AXES
from shardwise.train.division import Division

__all__ = ["Count", "StepResult", "TrainStep", "Weight"]

Count = int | Tensor
"""Targets: a number, or an int64 scalar that is still on the device."""

Weight = float | Tensor
"""The share of a microbatch's targets, likewise."""


class _NumTokens:
    """The field `num_tokens` of a `StepResult`: read where it is still on its way from the device."""

    def __get__(self, result: Any, owner: Any = None) -> int:
        if result is None:
            raise AttributeError  # so that dataclasses find no default
        found = vars(result)["num_tokens"]
        if isinstance(found, Late):
            found = vars(result)["num_tokens"] = int(found.read())
        return cast(int, found)

    def __set__(self, result: Any, value: int | Late) -> None:
        vars(result)["num_tokens"] = value


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step computed.

    Attributes:
        loss: float32 scalar on the mesh's device, detached: the mean over all target tokens of the full batch, the
            same on every rank. `float(result.loss)` waits for the device.
        num_tokens: target tokens of the full batch. Where the labels were on a GPU, to ask waits for this step's
            beginning.
        flops: operations of its forward and backward by the formula of [Note: model FLOPs] (`plan/token_work.py`),
            6 N + 12 L H Q T for each of its tokens: divided by seconds, devices and a device's peak, the MFU.
    """

    loss: Tensor
    num_tokens: _NumTokens = _NumTokens()
    flops: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "num_tokens": self.num_tokens}


class TrainStep:
    """Runs forward and backward of one batch and leaves summed, complete gradients in `parameter.grad`.

    Gradients accumulate over calls until they are zeroed, as in plain torch.

    Args:
        model: a model that `shardwise.load` or `shardwise.parallelize` returned.
        num_microbatches: into how many equal runs of rows a batch is divided; the rows must divide by it.

    Raises:
        BatchError: `num_microbatches` is no positive integer.
        ConfigError: the pipeline's schedule does not take so many microbatches.
        LayoutError: the model is not split by Shardwise.
        UnsupportedError: the model sees the tokens that it is to predict (an encoder with a causal model's loss), or
            its rows depend on each other, and batches are divided.
        UnsupportedError: parameters came into it later, where nothing says what they are.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, num_microbatches: int = 1) -> None:
        if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
            raise BatchError(
                f"num_microbatches is {num_microbatches!r}",
                why="it counts microbatches",
                fix="use an integer of at least 1",
            )
        self._registry = registry_of(model)
        self._pipeline = runner_of(model)
        self._schedule = self._schedule_of(self._pipeline, num_microbatches) if self._pipeline is not None else None
        check_label_use(model)
        self._division = Division(model, num_microbatches * mesh.data_size, mesh.device)
        self._targets = target_names(model)
        self._gradients = gradients_of(model)
        self._gradients.parameters()  # says now which of them cannot be trained
        self.model = model
        self.mesh = mesh
        self.num_microbatches = num_microbatches
        # Where the device computes by itself, forwards ask it nothing; on CPUs an answer costs nothing.
        self._knows_rows = self._gradients.is_late and take_own_attention(find_model(model))
        self._kernels = take_kernels(mesh.device) if self._knows_rows else None
        # A step needs no cache of keys and values. Other forwards build none in training mode (`parallel/caches.py`).
        self._defaults = (
            {"use_cache": False} if "use_cache" in inspect.signature(find_model(model).forward).parameters else {}
        )
        self._as_tuple = getattr(getattr(find_model(model), "config", None), "return_dict", True) is False
        # Gradients are divided by a factor when they are reduced, so that the loss is multiplied by it.
        self._loss_factor = self._registry.divide_factor if mesh.data_size > 1 else 1.0

    @staticmethod
    def _schedule_of(pipeline: PipelineRunner, num_microbatches: int) -> Schedule:
        return pipeline.schedule(num_microbatches)

    def __call__(self, batch: Mapping[str, Any]) -> StepResult:
        """Computes loss and gradients of `batch`.

        Args:
            batch: the keyword arguments of the model's forward, labels included: tensors `[rows, …]`, on any device;
                this data rank's rows, the same on every tp and pp rank. Values without rows are passed on as they are.

        Returns:
            The loss as the mean over all target tokens, and their number. A microbatch without any target counts
            nothing; where the full batch has none, the loss is 0 and gradients stay as they are (of labels on a GPU the
            host does not know, and zeros are added). Auxiliary losses that a model adds to its own (a mixture of
            experts' balance) are computed on each microbatch of each data rank and averaged with the same weights. A
            loss without token labels (classes, regression) is weighted by rows, one of spans by those in the sequence.
            Of several targets (tokens and sentences, beginnings and ends) each counts by its own number.

        Raises:
            RankError: the ranks' optimizers have taken other steps.
            BatchError: labels are missing or no tensor, tensors differ in rows, rows do not divide by
                `num_microbatches`, a microbatch has some of several targets and none of the first, or ranks that differ
                in tp or pp alone were given different batches.
            UnsupportedError: gradients are switched off; where batches are divided, batch norms are trained, or the
                caller's `loss_function` is no mean over targets; or stages are asked for hidden states, attentions, or
                router logits that the config did not ask for when the model was split.
            GradientError: the loss depends on nothing that is trained.
            IndexError: a token id or a target is outside the vocabulary.

        Communicates: over tp and pp, one all-gather of 16 bytes a rank; over all ranks, one all-reduce of the numbers
            of targets and operations, where there are several data ranks, and another one for models that take several
            targets; what the model's forward and backward do,
            under pp what stages send each other; the gradient phase (see [Note: one gradient phase]); over pp and over
            the data ranks, one all-reduce of the loss.
        """
        self.mesh.note_step()
        with hidden():
            return self._step(batch)

    def _step(self, batch: Mapping[str, Any]) -> StepResult:
        parts, counts, num_tokens, flops = self._prepare(batch)
        loss_scale = self._gradients.loss_scale
        scale = loss_scale.factor if loss_scale is not None else 1.0
        self._scale_gradients(scale)  # those of earlier calls, which this one's are added to
        weights = [_share(count, num_tokens) for count in counts]
        total = torch.zeros((), device=self.mesh.device)
        try:
            with dropped_output(self._registry.context):
                self._run(parts, weights, scale, total, is_empty=not isinstance(num_tokens, Tensor) and not num_tokens)
        finally:
            self._scale_gradients(1 / scale)
        for group in (self.mesh.group("pp"), self.mesh.group(*DATA_AXES)):
            if group is not None:
                all_reduce_(total, group)
        self._gradients.loss = total
        counted = Late(num_tokens) if isinstance(num_tokens, Tensor) else num_tokens
        return StepResult(loss=total, num_tokens=counted, flops=flops)

    def _run(
        self, parts: list[dict[str, Any]], weights: list[Weight], scale: Weight, total: Tensor, *, is_empty: bool
    ) -> None:
        """Forward and backward of all microbatches; adds their losses to `total`."""
        if is_empty:  # which all ranks know
            return
        if self._schedule is not None:
            self._run_pipeline(parts, weights, scale, total)
            return
        with self._gradients.together(), compared_already(self._registry.context):
            for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                if len(parts) > 1:
                    time_reduction(self._registry, is_last=number == len(parts) - 1)
                total += self._microbatch(part, weight, scale)

    def _prepare(self, batch: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Count], Count, float]:
        """The microbatches, on the device, their numbers of targets, and over all ranks' batches that number and the
        operations.
        """
        fault: ShardwiseError | None = None
        rows, kilo_flops = 0, 0
        counts: list[Count] = [0]
        each: list[dict[str, int]] = []
        also = self._describe()
        try:
            check_same_batch((batch, self.num_microbatches), self._registry.context, also=also)
            _check_gradients()
            rows = check_batch(self.model, batch, self.num_microbatches)
            self._check_arguments(batch)
            on_host = split_rows(batch, rows, self.num_microbatches)
            counts = [self._count(part) for part in on_host]
            each = [count_each_target(self.model, part) if len(self._targets) > 1 else {} for part in on_host]
            check_shares(each)
            kilo_flops = flops_of(batch, self._registry.plan.work) // 1000
        except ShardwiseError as error:
            if self.mesh.data_size == 1:
                raise
            fault = error
        num_tokens, kilo_flops = self._sum_over_data([sum(counts), kilo_flops], fault, also)
        totals = [sum(found.get(name, 0) for found in each) for name in self._targets]
        if len(totals) > 1:
            totals = self._sum_over_data(totals, None, also)
        self._agree_on_kernels()
        placed = (
            batch.take() if isinstance(batch, SentBatch) else {k: send(v, self.mesh.device) for k, v in batch.items()}
        )
        parts = split_rows(placed, rows, self.num_microbatches)
        for part, found, seen in zip(parts, each, on_host, strict=True):
            part.update(share_targets(part, found, dict(zip(self._targets, totals, strict=True))))
            known = own_rows(seen, self.mesh.device) if self._knows_rows else None
            # A stage runs once; whether it has missed where documents end is known afterwards.
            if known is not None and (self._pipeline is None or known.segments is None):
                part["attention_mask"] = known.mask
        return parts, counts, num_tokens, kilo_flops * 1e3

    def _check_arguments(self, batch: Mapping[str, Any]) -> None:
        """Raises for what a step cannot do with several microbatches or ranks."""
        self._division.check(batch)
        if self._pipeline is not None:
            check_asked_outputs(find_model(self.model), batch, self._pipeline.asked_outputs)
        if batch.get("num_items_in_batch") is not None and self.num_microbatches * self.mesh.data_size > 1:
            raise BatchError(
                "a batch has num_items_in_batch",
                why="a step counts the targets of the full batch itself, and weights every microbatch by its own",
                fix="leave it out",
            )

    def _count(self, part: Mapping[str, Any]) -> Count:
        """The targets of a microbatch; left on a device that computes by itself where one rank's say is enough."""
        stays = self._gradients.is_late and self.mesh.data_size == 1 and self._pipeline is None
        return count_targets(self.model, part, stays=stays)

    def _describe(self) -> dict[str, Any]:
        """What must be the same on all ranks besides the rows."""
        if self._pipeline is not None:
            also: dict[str, Any] = {"the model": self._pipeline.name}
        else:
            first = next(self.model.parameters(), None)
            also = {"gradients of earlier steps": first is not None and first.grad is not None}
            also["dtype of parameters"] = None if first is None else first.dtype
        also |= {"model.training": self.model.training, "gradients": torch.is_grad_enabled()}
        return {**also, "num_microbatches": self.num_microbatches}

    def _agree_on_kernels(self) -> None:
        """Once, for cards of several kinds: copies of what is not split must come out equal on all ranks."""
        if self._kernels is None:
            return
        orders, self._kernels = json.dumps(self._kernels), None
        if not compare_later(self.mesh.group(), orders, device=self.mesh.device, doing="a step")():
            drop_kernels()
            if self.mesh.rank == 0:
                said = "shardwise doctor has measured other orders of attention kernels on other ranks' cards"
                warnings.warn(f"{said}: all ranks go by torch's", stacklevel=2)

    def _sum_over_data(self, counts: list[Any], fault: ShardwiseError | None, also: Mapping[str, Any]) -> list[Any]:
        """The sums of all data ranks' counts. Where some rank's batch is at fault, its error, on every rank; and where
        they do not make the same call.
        """
        world = self.mesh.group()
        if self.mesh.data_size == 1 or world is None:
            return counts
        described = describe_call(self._registry.context, also)
        totals = torch.tensor(
            [*counts, fault is not None, *words_of(described)], device=host_device(world, self.mesh.device)
        )
        all_reduce_(totals, world)
        *sums, num_faults, words, squares = totals.tolist()
        if num_faults:
            with raise_on_all_ranks(self.mesh.group(), "checking its batch"):
                if fault is not None:
                    raise fault
        check_same_call(world, described, (words, squares), self._registry.context)
        return [number * self.mesh.data_size // self.mesh.shape.world_size for number in sums]

    def _scale_gradients(self, factor: Weight) -> None:
        if isinstance(factor, Tensor):  # others are 1
            multiply_gradients(self.model.parameters(), factor)

    def _microbatch(self, part: dict[str, Any], weight: Weight, scale: Weight) -> Tensor:
        """Backward of one microbatch's mean loss times `weight`; returns that product, detached."""
        if not isinstance(weight, Tensor) and weight == 0.0 and self.mesh.data_size == 1:
            return torch.zeros((), device=self.mesh.device)
        loss = self.model(**self._arguments(part, weight)).loss
        if missed_rows(part):
            self._knows_rows = False
            del part["attention_mask"]
            loss = self.model(**self._arguments(part, weight)).loss
        _check_trains(trains=loss.requires_grad)
        self._weighted(loss, weight, scale).backward()
        return loss.detach().float() * weight

    def _arguments(self, part: dict[str, Any], weight: Weight) -> dict[str, Any]:
        """Those of the forward. Where a microbatch without targets runs all the same, because other ranks wait for its
        gradients or only the device knows, some are made up, which count nothing: the mean over none is 0/0.
        """
        made_up: dict[str, Any] = {}
        if isinstance(weight, Tensor):
            made_up = {name: torch.where(weight == 0, own, part[name]) for name, own in make_up_targets(part).items()}
        elif weight == 0.0:
            made_up = make_up_targets(part)
        returned = {"return_dict": True} if self._as_tuple or part.get("return_dict") is False else {}
        return self._defaults | part | made_up | returned

    def _weighted(self, loss: Tensor, weight: Weight, scale: Weight) -> Tensor:
        """What backward starts from."""
        factor = weight * self._loss_factor * scale
        return loss if not isinstance(factor, Tensor) and factor == 1.0 else loss * factor

    def _run_pipeline(self, parts: list[dict[str, Any]], weights: list[Weight], scale: Weight, total: Tensor) -> None:
        """All microbatches through the stages, forward and backward; the last stage's rank adds losses to `total`."""
        assert self._pipeline is not None
        assert self._schedule is not None

        def microbatch(part: dict[str, Any], weight: Weight) -> Microbatch:
            def loss_of(output: Any) -> Tensor:
                total.add_(output.loss.detach().float() * weight)
                return self._weighted(output.loss, weight, scale)

            return Microbatch(self._arguments(part, weight), loss_of)

        with self._gradients.together():
            self._pipeline.run([microbatch(*each) for each in zip(parts, weights, strict=True)], self._schedule)
        leads = any(isinstance(x, Tensor) and x.requires_grad for part in parts for x in part.values())
        _check_trains(trains=leads or self._pipeline.trains)


def _check_trains(*, trains: bool) -> None:
    if not trains:
        raise GradientError(
            "the loss depends on nothing that is trained",
            why="requires_grad is False of all parameters that it depends on",
            fix="train some, or call the model itself, under torch.no_grad(), where only the loss is wanted",
        )


def _check_gradients() -> None:
    if not torch.is_grad_enabled():
        mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        raise UnsupportedError(
            f"a training step under {mode}",
            why="a step computes gradients",
            fix="call it outside, or the model itself where only the loss is wanted",
        )


def _share(count: Count, num_tokens: Count) -> Weight:
    if isinstance(count, Tensor):
        return count / cast(Tensor, num_tokens).clamp(min=1)
    return count / num_tokens if num_tokens else 0.0
