"""One training step, forward and backward, for every layout."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.agree import Agreement
from shardwise.comm.collectives import all_reduce_
from shardwise.data.ahead import DeviceBatch, send
from shardwise.data.batch import (
    Count,
    Runs,
    TargetWeights,
    Weight,
    batch_norms,
    check_batch,
    check_divides,
    count_targets,
    divide_media,
    flops_of,
    refuse_batch_norm,
    split_rows,
)
from shardwise.errors import BatchError, GradientError, UnsupportedError
from shardwise.loss.label_use import check_label_use, check_model_divides
from shardwise.loss.logits import dropped_output
from shardwise.mesh import Mesh
from shardwise.optim.gradients import HostCopy, gradients_of
from shardwise.optim.summing import multiply_gradients, time_reduction
from shardwise.parameters.registry import registry_of
from shardwise.pipeline.outputs import check_asked_outputs
from shardwise.pipeline.runner import PipelineRunner, runner_of
from shardwise.pipeline.stage import Microbatch
from shardwise.plan.options import check_kind
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.host_masks import host_mask_of, read_host_mask, take_host_masks
from shardwise.runtime.same_batch import agree_over_data, call_fingerprint, check_same_batch, compared_already
from shardwise.schedule.schedule import Schedule
from shardwise.topology.shape import DATA_AXES


class _Late:
    """Descriptor of a `StepResult` field that waits for its value from the device."""

    def __init__(self, kind: type, *default: Any) -> None:
        self._kind, self._default = kind, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, result: Any, owner: Any = None) -> Any:
        if result is None:
            if not self._default:
                raise AttributeError  # so that dataclasses see no default
            return self._default[0]
        value = vars(result)[self._name]
        if isinstance(value, HostCopy):
            value = vars(result)[self._name] = self._kind(value.read())
        return value

    def __set__(self, result: Any, value: Any) -> None:
        vars(result)[self._name] = value


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A batch that has passed this rank's checks: rows, runs of images, microbatches, targets, operations."""

    rows: int
    runs: Runs
    parts: list[dict[str, Any]]
    counts: list[Count]
    flops: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a training step.

    Attributes:
        loss: float32 scalar on the mesh's device, detached: the mean over all target tokens of the full batch, the same
            on every rank. `float(result.loss)` waits for the device.
        num_tokens: target tokens of the full batch. With labels on a GPU, reading it waits for the start of this step.
        flops: operations of forward and backward by the formula of [Note: model FLOPs] (`plan/decision.py`), 6 N + 12
            L H Q T per token. Divided by seconds, devices and a device's peak rate it gives the MFU.
    """

    loss: Tensor
    num_tokens: _Late = _Late(int)
    flops: _Late = _Late(float, 0.0)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "num_tokens": self.num_tokens, "flops": self.flops}


class TrainStep:
    """Runs forward and backward of one batch and leaves summed, complete gradients in `parameter.grad`.

    Gradients accumulate over calls until they are zeroed, as in plain torch.

    Args:
        model: a model from `shardwise.load` or `shardwise.parallelize`.
        num_microbatches: number of equal runs of rows into which a batch is divided; the rows must divide by it.

    Raises:
        BatchError: `num_microbatches` is no positive integer.
        ConfigError: the pipeline's schedule does not support the number of microbatches.
        LayoutError: the model is not split by Shardwise.
        UnsupportedError: the model sees the tokens that it should predict (an encoder with a causal model's loss); its
            rows depend on each other, and batches are divided; or parameters were added later whose split is unknown.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, num_microbatches: int = 1) -> None:
        if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
            raise BatchError(
                f"num_microbatches is {num_microbatches!r}",
                why="it counts microbatches",
                fix="use an integer of at least 1",
            )
        check_kind("the mesh of a step", mesh, Mesh, fix="pass the mesh over which the model is split")
        self._registry = registry_of(model)
        self._pipeline = runner_of(model)
        self._schedule = self._schedule_of(self._pipeline, num_microbatches) if self._pipeline is not None else None
        check_label_use(model)
        self._num_parts = num_microbatches * mesh.data_size
        check_model_divides(model, self._num_parts)
        self._batch_norms = batch_norms(model) if self._num_parts > 1 else []
        self._gradients = gradients_of(model)
        self._gradients.adopt_added()  # says now which of them cannot be trained
        self.model = model
        self.mesh = mesh
        self.num_microbatches = num_microbatches
        # Where the device computes by itself, forwards ask it nothing; on CPUs an answer costs nothing.
        self._gives_masks = self._gradients.is_late and take_host_masks(find_model(model))
        self._tries_masks = self._gives_masks and self._pipeline is None
        self._comparison: Agreement | None = None
        self._has_compared = False
        # A step needs no cache of keys and values. Other forwards build none in training mode (`parallel/apply.py`).
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
            batch: keyword arguments of the model's forward, including labels: tensors `[rows, …]` on any device. They
                are this data rank's rows, the same on every tp and pp rank. Values without rows are passed on
                unchanged. Images, videos and sound may have other rows (several images per row or none, patches): a
                microbatch gets those whose placeholder tokens are in its rows.

        Returns:
            The loss as the mean over all target tokens, and their number. A microbatch without targets counts nothing.
                If the full batch has none, the loss is 0 and gradients do not change (with labels on a GPU, zeros are
                added). Auxiliary losses inside the model's loss (a mixture of experts' balance) are computed per
                microbatch of each data rank and averaged with the same weights. A loss without token labels (classes,
                regression) is weighted by rows; a loss of spans by those inside the sequence.

        Raises:
            RankError: the ranks' optimizers have taken different steps.
            BatchError: labels are missing or no tensor, tensors differ in rows, rows do not divide by
                `num_microbatches`, or ranks that differ only in tp or pp have different batches.
            UnsupportedError: gradients are disabled; batches are divided and batch norms are trained, the loss function
                is the caller's own, or there are several kinds of targets in unequal numbers; or a pipeline is asked
                for hidden states, attentions, or router logits that the config did not ask for when the model was
                split.
            GradientError: the loss depends on no trained parameter.
            IndexError: a token id or a target is outside the vocabulary.

        Communicates: over tp and pp, one all-gather of 40 bytes per rank; over the data axes another one, and on GPUs
        one all-reduce of the numbers of targets and operations; what the model's forward and backward do, with pp
        including messages between stages; the gradient phase (see [Note: one gradient phase]); over pp and over the
        data axes, one all-reduce of the loss.
        """
        self.mesh.note_step()
        described = self._describe()
        fault, checked = None, None
        try:
            trained = (
                [any(each.requires_grad for each in self.model.parameters()), self.mesh.coord("pp")]
                if self._pipeline is not None
                else []
            )
            inputs = batch, self.num_microbatches
            ranks = check_same_batch(inputs, self._registry.context, also=described, numbers=trained)
            if self._pipeline is not None:
                self._gradients.note_trained(ranks)
            checked = self._check(batch)
        except Exception as error:  # noqa: BLE001 - raised on every rank that would wait for this one
            fault = error
        num_tokens, flops = self._sum_over_data(checked, fault, described)
        assert checked is not None
        parts = self._place(batch, checked)
        loss_scale = self._gradients.loss_scale
        scale = loss_scale.factor if loss_scale is not None else 1.0
        self._scale_gradients(scale)  # those of earlier calls, which this one's are added to
        total = torch.zeros((), device=self.mesh.device)
        try:
            with dropped_output(self._registry.context), self._without_batch_norms():
                self._run(TargetWeights(parts, checked.counts, num_tokens), scale, total)
        finally:
            self._scale_gradients(1 / scale)
        for group in (self.mesh.group("pp"), self.mesh.group(*DATA_AXES)):
            if group is not None:
                all_reduce_(total, group)
        self._gradients.loss = total
        late = [HostCopy(value) if isinstance(value, Tensor) else value for value in (num_tokens, flops)]
        return StepResult(loss=total, num_tokens=late[0], flops=late[1])

    def _check(self, batch: Mapping[str, Any]) -> _Checked:
        """Raises if this rank cannot train on its batch. Communicates nothing."""
        _check_gradients()
        rows = check_batch(self.model, batch, self.num_microbatches)
        runs = divide_media(self.model, batch, rows, self.num_microbatches)
        parts = split_rows(batch, rows, self.num_microbatches, runs)
        check_divides(self.model, batch, parts, self._num_parts)
        if self._pipeline is not None:
            check_asked_outputs(find_model(self.model), batch, self._pipeline.asked_outputs)
        if batch.get("num_items_in_batch") is not None and self._num_parts > 1:
            raise BatchError(
                "a batch has num_items_in_batch",
                why="a step counts the targets of the full batch itself, and weights every microbatch by its own",
                fix="leave it out",
            )
        counts = [self._count(part) for part in parts]
        flops = flops_of(batch, self._registry.plan.work)
        return _Checked(rows=rows, runs=runs, parts=parts, counts=counts, flops=flops)

    def _sum_over_data(
        self, checked: _Checked | None, fault: Exception | None, described: Mapping[str, Any]
    ) -> tuple[Count, float | Tensor]:
        """Returns the targets and operations of all data ranks' batches.

        Where the device computes by itself the sums stay there, and whether the ranks made the same call is read at the
        next step: no host waits for another one. Then a rank whose batch is at fault raises at once, and the others in
        the next step. The first step waits.
        """
        numbers = [sum(checked.counts), checked.flops // 1000] if checked is not None else [0, 0]
        if self.mesh.data_size == 1:
            if fault is not None:
                raise fault
            return numbers[0], numbers[1] * 1e3
        last, self._comparison = self._comparison, None
        if last is not None:
            last.wait(is_late=True)
        stays = self._gradients.is_late
        comparison = agree_over_data(
            self.mesh,
            call_fingerprint(self._registry.context, described),
            fault=fault,
            numbers=() if stays else [int(number) for number in numbers],
        )
        if stays and self._has_compared:
            self._comparison = comparison
            if fault is not None:
                raise fault
        else:
            everyone = comparison.wait()
            self._has_compared = True
        if not stays:
            num_tokens, kilo_flops = map(sum, zip(*everyone, strict=True))
            return num_tokens, kilo_flops * 1e3
        totals = torch.stack([_on_device(number, self.mesh.device) for number in numbers])
        data = self.mesh.group(*DATA_AXES)
        assert data is not None, "there are several data ranks"
        all_reduce_(totals, data)
        return totals[0], totals[1] * 1e3

    def _place(self, batch: Mapping[str, Any], checked: _Checked) -> list[dict[str, Any]]:
        """Returns the microbatches on the device, with masks whose content the host knows."""
        if isinstance(batch, DeviceBatch):
            placed = batch.take()
        else:
            placed = {name: send(value, self.mesh.device) for name, value in batch.items()}
        parts = split_rows(placed, checked.rows, self.num_microbatches, checked.runs)
        for part, given in zip(parts, checked.parts, strict=True) if self._gives_masks else ():
            known = read_host_mask(given, self.mesh.device)
            # A stage runs once; whether it has missed where documents end is known afterwards.
            if known is not None and (self._pipeline is None or known.segments is None):
                part["attention_mask"] = known.mask
        return parts

    def _run(self, batch: TargetWeights, scale: Weight, total: Tensor) -> None:
        """Runs forward and backward of all microbatches; adds their losses to `total`."""
        if batch.is_empty:  # which all ranks know
            return
        if self._schedule is not None:
            self._run_pipeline(batch, scale, total)
            return
        with self._gradients.no_sync(), compared_already(self._registry.context):
            for number in range(len(batch)):
                if len(batch) > 1:
                    time_reduction(self._registry, is_last=number == len(batch) - 1)
                if (
                    self.mesh.data_size == 1
                    and not isinstance(batch.counts[number], Tensor)
                    and not batch.counts[number]
                ):
                    continue
                loss = self._forward(batch, number)
                weight = batch.weight(number)
                _check_trains(trains=loss.requires_grad)
                self._weighted(loss, weight, scale).backward()
                total += loss.detach().float() * weight

    def _forward(self, batch: TargetWeights, number: int) -> Tensor:
        """Returns the mean loss of a microbatch.

        The first microbatch decides, for all data ranks alike, whether the model uses the host's masks. If it ignored
        them although rows hold several documents, it runs again with full masks on all ranks.
        """
        loss: Tensor = self.model(**self._arguments(batch, number)).loss
        if not self._tries_masks:
            return loss
        self._tries_masks = False
        known = host_mask_of(batch.parts[number])
        is_unused = known is None or not known.is_used
        masks = [host_mask_of(part) for part in batch.parts]
        has_documents = any(mask is not None and mask.segments is not None for mask in masks)
        what = "ranks do not train alike"
        group = self.mesh.group(*DATA_AXES)
        numbers = Agreement(group, {}, doing="a step", what=what, fix="", numbers=(is_unused, has_documents)).wait()
        unused, documents = (any(column) for column in zip(*numbers, strict=True))
        if not unused:
            return loss
        self._gives_masks = False
        for part, mask in zip(batch.parts, masks, strict=True):
            if mask is not None and mask.segments is not None:
                del part["attention_mask"]
        return self.model(**self._arguments(batch, number)).loss if documents else loss

    def _count(self, part: Mapping[str, Any]) -> Count:
        """Number of targets of a microbatch; stays on an asynchronous device if this rank alone needs it."""
        stays = self._gradients.is_late and self._pipeline is None
        return count_targets(self.model, part, stays=stays)

    def _describe(self) -> dict[str, Any]:
        """Returns the facts besides the rows that must be equal on all ranks."""
        if self._pipeline is not None:
            also: dict[str, Any] = {"the model": self._pipeline.name}
        else:
            first = next(self.model.parameters(), None)
            also = {"gradients of earlier steps": first is not None and first.grad is not None}
            also["dtype of parameters"] = None if first is None else first.dtype
        also |= {"model.training": self.model.training, "gradients": torch.is_grad_enabled()}
        return {**also, "num_microbatches": self.num_microbatches}

    def _scale_gradients(self, factor: Weight) -> None:
        if isinstance(factor, Tensor):  # others are 1
            multiply_gradients(self.model.parameters(), factor)

    @contextmanager
    def _without_batch_norms(self) -> Iterator[None]:
        """Context manager: a batch norm in training mode raises, if batches are divided."""
        refuse = partial(refuse_batch_norm, find_model(self.model), self._num_parts)
        handles = [norm.register_forward_pre_hook(lambda norm, _: refuse(norm)) for norm in self._batch_norms]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arguments(self, batch: TargetWeights, number: int) -> dict[str, Any]:
        """Returns the arguments of the forward."""
        arguments = batch.arguments(number)
        returned = {"return_dict": True} if self._as_tuple or arguments.get("return_dict") is False else {}
        return self._defaults | arguments | returned

    def _weighted(self, loss: Tensor, weight: Weight, scale: Weight) -> Tensor:
        """Returns the scalar on which backward is called."""
        factor = weight * self._loss_factor * scale
        return loss if not isinstance(factor, Tensor) and factor == 1.0 else loss * factor

    def _run_pipeline(self, batch: TargetWeights, scale: Weight, total: Tensor) -> None:
        """Runs forward and backward of all microbatches through the stages; the last stage adds losses to `total`."""
        assert self._pipeline is not None
        assert self._schedule is not None

        def loss_of(output: Any, weight: Weight) -> Tensor:
            total.add_(output.loss.detach().float() * weight)
            return self._weighted(output.loss, weight, scale)

        microbatches = [
            Microbatch(self._arguments(batch, number), partial(loss_of, weight=batch.weight(number)))
            for number in range(len(batch))
        ]
        with self._gradients.no_sync():
            self._pipeline.run(microbatches, self._schedule)
        leads = any(isinstance(x, Tensor) and x.requires_grad for part in batch.parts for x in part.values())
        _check_trains(trains=leads or self._pipeline.trains)


def _on_device(number: Count, device: torch.device) -> Tensor:
    """Returns a number as an int64 scalar on the device, without host synchronization."""
    return number.long() if isinstance(number, Tensor) else torch.full((), number, dtype=torch.int64, device=device)


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
