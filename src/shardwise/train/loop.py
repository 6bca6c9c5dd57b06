"""Training loop of `shardwise train`: takes batches, steps, and reports.

Its components are built elsewhere, so it does not know how a model was split or where a batch came from.
"""

import functools
import inspect
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import all_reduce_
from shardwise.data.ahead import PrefetchLoader, send
from shardwise.data.batch import IGNORED, SPANS, count_targets, make_up_targets, sums_rows
from shardwise.data.rows import Rows
from shardwise.errors import BatchError, GradientError
from shardwise.estimate.flops import peak_flops
from shardwise.mesh import Mesh
from shardwise.optim.gradients import HostCopy
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.modes import in_eval_mode
from shardwise.topology.shape import DATA_AXES
from shardwise.train.run_config import OptimizerConfig, lr_factor
from shardwise.train.step import StepResult


class Observer(Protocol):
    """Computes metrics from the outputs of an evaluation."""

    def see(self, outputs: Any, batch: Mapping[str, Tensor], rows: Sequence[int]) -> None:
        """Notes the outputs of a batch of these rows."""
        ...

    def results(self) -> Mapping[str, float]:
        """Returns the metrics by name, the same on every rank."""
        ...


def build_evaluation(
    model: nn.Module,
    mesh: Mesh,
    batches: Callable[[], Iterator[tuple[Sequence[int], dict[str, Tensor]]]],
    observer: Observer | None = None,
) -> Callable[[], dict[str, float]]:
    """Returns a function that computes metrics over `batches()`, the same on every rank: the "loss", a mean over all
    target tokens or the sum that the model computes, and those of `observer`, or without one "perplexity".

    The model runs in eval mode; afterwards every module is in its previous mode. Without targets the loss is NaN.

    Communicates: what the model's forwards do, and over the data ranks one all-reduce of two values; what the observer
    does.
    """
    # Beside a cache, transformers' models take rows for one document each (see [Note: packed rows]).
    inner: Any = find_model(model)
    is_sum = sums_rows(inner)
    takes = inspect.signature(inner.forward).parameters.values()
    uses_cache = getattr(getattr(inner, "config", None) and inner.config.get_text_config(), "use_cache", False)
    takes_cache = any(each.name == "use_cache" or (uses_cache and each.kind is each.VAR_KEYWORD) for each in takes)
    without_cache: dict[str, Any] = {"use_cache": False} if takes_cache else {}

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        with in_eval_mode(model):
            for rows, batch in batches():
                count = 1 if is_sum else count_targets(model, batch)
                # Other ranks wait for this one, so it computes a loss even where nothing counts.
                targets = {} if count else make_up_targets(batch)
                inputs = {
                    name: send(value, mesh.device) for name, value in {**without_cache, **batch, **targets}.items()
                }
                outputs = model(**inputs)
                loss = outputs.loss
                totals += torch.stack([loss.double() * count, torch.full_like(loss, count, dtype=torch.float64)])
                if observer is not None:
                    observer.see(outputs, {name: send(value, mesh.device) for name, value in batch.items()}, rows)
        group = mesh.group(*DATA_AXES)
        if group is not None:
            all_reduce_(totals, group)
        loss = float(totals[0] if is_sum else totals[0] / totals[1])
        return {
            "loss": loss,
            **({"perplexity": math.exp(min(loss, 700.0))} if observer is None else observer.results()),
        }

    return evaluate


def evaluation_batches(
    rows: Rows, *, batch_size: int, max_batches: int, data_rank: int = 0, data_size: int = 1, counts_rows: bool = False
) -> Iterator[tuple[Sequence[int], dict[str, Tensor]]]:
    """Yields this data rank's share of every global batch of rows, in order: the numbers of the rows, and their batch.

    The last batch is filled up with rows whose labels are all ignored, so that every rank gets equally many batches of
    equal shape.

    Args:
        counts_rows: whether the loss is a mean over rows, of which none can be ignored: then the last batch is left
            out instead.
    """
    num_rows = min(rows.num_rows, batch_size * max_batches)
    if counts_rows:
        num_rows -= num_rows % batch_size
    share = batch_size // data_size
    for first in range(0, num_rows, batch_size):
        places = range(first, first + batch_size)
        batch = [min(place, num_rows - 1) for place in places]
        own = slice(data_rank * share, (data_rank + 1) * share)
        found = rows.read(batch[own], width=rows.width(batch))
        is_filler = [place >= num_rows for place in places[own]]
        for name in ("labels", *SPANS) if any(is_filler) else ():
            if name in found:
                found[name][is_filler] = IGNORED if name == "labels" else torch.iinfo(torch.int64).max
        yield batch[own], found


logger = logging.getLogger("shardwise.train")


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """Components of a run.

    Attributes:
        step: forward and backward of one batch; leaves gradients in the model (a `TrainStep`).
        clip: clips gradients to a norm and returns the norm before clipping.
        evaluate: returns the metrics of held-out data, "loss" among them; None without held-out data.
        after_evaluation: called on every rank after an evaluation; returns whether the run should end.
        nonfinite: handling of infinite or NaN gradients. "checked": the loop checks before every update and raises.
            "raised": the optimizer raises, so the loop does not check. "skipped": the optimizer skips the step.
    """

    step: Callable[[Mapping[str, torch.Tensor]], StepResult]
    clip: Callable[[float], torch.Tensor | float]
    optimizer: torch.optim.Optimizer
    batches: Iterator[Mapping[str, torch.Tensor]]
    device: torch.device
    evaluate: Callable[[], Mapping[str, float]] | None = None
    after_evaluation: "Callable[[StepRecord], bool]" = lambda record: False
    nonfinite: Literal["checked", "raised", "skipped"] = "checked"
    num_devices: int = 1


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Log record of one optimizer step.

    Attributes:
        loss: mean over the tokens of the global batch, before this step's update.
        tokens_per_second: over all ranks.
        memory_bytes: peak memory of this rank so far: allocated on its GPU, or of the process without a GPU.
        reserved_bytes: peak GPU memory reserved by torch, including fragmentation.
        tflops: model FLOPs per second and device, in 10^12: see [Note: model FLOPs] in `plan/decision.py`. None if a
            step does not count them.
        mfu: share of the device's peak bfloat16 rate (`estimate/flops.py`); None if that is unknown.
        eval_loss: mean over the held-out tokens, after this step's update; None if no evaluation was due.
        eval_perplexity: exponential of `eval_loss`; None where the task has other metrics.
        eval_metrics: these, by name.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    memory_bytes: int
    reserved_bytes: int | None = None
    tflops: float | None = None
    mfu: float | None = None
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_metrics: Mapping[str, float] | None = None

    def numbers(self) -> dict[str, float]:
        """Returns every number by its name: those that are known, and metrics as `eval_...`."""
        own = {name: value for name, value in vars(self).items() if value is not None and name != "eval_metrics"}
        return own | {f"eval_{name}": value for name, value in (self.eval_metrics or {}).items()}


class Reporter(Protocol):
    """Receiver of step records."""

    def report(self, record: StepRecord) -> None: ...


class Checkpoints(Protocol):
    """Callback after every step that saves checkpoints."""

    def after_step(self, step: int, *, is_last: bool) -> bool:
        """Saves a checkpoint if one is due. Returns whether the run should end now."""
        ...


def run_loop(
    parts: TrainingComponents,
    *,
    num_steps: int,
    settings: OptimizerConfig,
    reporters: Sequence[Reporter] = (),
    eval_every: int = 0,
    num_done: int = 0,
    checkpoints: Checkpoints | None = None,
    report_every: int = 1,
) -> StepRecord | None:
    """Runs the steps up to `num_steps` and returns the last record; None if no step was left to do.

    # [Note: late records]
    Reading a loss waits for all work on the GPU, which then idles until the host has launched the next step. So losses
    and norms stay on the device until they are reported: the records of `report_every` steps are read together, and
    each has their mean speed. On asynchronous devices they are reported after the next step has been launched. The
    first step, the last one, and those before an evaluation are read at once. Unreported records are reported if the
    run fails.

    Args:
        settings: the learning rate, its schedule and clipping.
        eval_every: steps between evaluations; an evaluation always follows the last step. 0: no evaluation.
        checkpoints: called after every step, after the reporters; may end the run.
        report_every: number of steps whose records are read together.
    """
    told = _Records(parts, reporters)
    try:
        for index in range(num_done, num_steps):
            is_last = index + 1 == num_steps
            factor = lr_factor(settings.schedule, step=index, num_steps=num_steps)
            step = _run_step(parts, index + 1, lr=settings.lr, factor=factor, max_grad_norm=settings.max_grad_norm)
            if isinstance(parts.batches, PrefetchLoader) and not is_last:
                parts.batches.fetch()
            told.flush_copied()
            told.add(step)
            if parts.evaluate is not None and eval_every and ((index + 1) % eval_every == 0 or is_last):
                told.tell(evaluate=parts.evaluate)
                assert told.last is not None
                is_last |= parts.after_evaluation(told.last)
            elif is_last or index == num_done:
                told.tell()
            elif (index + 1) % report_every == 0:
                told.send() if parts.device.type == "cuda" else told.tell()
            if (checkpoints is not None and checkpoints.after_step(index + 1, is_last=is_last)) or is_last:
                break
    finally:
        told.tell()
    return told.last


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step whose loss and norm are still on the device."""

    number: int
    lr: float
    result: StepResult
    grad_norm: torch.Tensor
    seconds: float


class _Records:
    """Queue of steps that are not reported yet, and their reporters; see [Note: late records]."""

    def __init__(self, parts: TrainingComponents, reporters: Sequence[Reporter]) -> None:
        self.last: StepRecord | None = None
        self._parts, self._reporters = parts, list(reporters)
        self._waiting: list[_Step] = []
        self._sent: list[tuple[list[_Step], HostCopy]] = []

    def add(self, step: _Step) -> None:
        """Adds a step."""
        self._waiting.append(step)

    def send(self) -> None:
        """Starts to copy the numbers of all queued steps to the host."""
        steps, self._waiting = self._waiting, []
        device = self._parts.device
        pairs = [
            torch.stack([step.result.loss.to(device).double(), step.grad_norm.to(device).double()]) for step in steps
        ]
        self._sent.append((steps, HostCopy(torch.stack(pairs))))

    def tell(self, *, evaluate: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Reports all queued steps in order; evaluates with the last one."""
        if self._waiting:
            self.send()
        self.flush_copied(evaluate=evaluate)

    def flush_copied(self, *, evaluate: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Reports the steps whose numbers have been sent; see `tell`."""
        sent, self._sent = self._sent, []
        for steps, late in sent:
            started = time.perf_counter()
            values = late.read()
            seconds = (sum(step.seconds for step in steps) + time.perf_counter() - started) / len(steps)
            for step, (loss, grad_norm) in zip(steps, values, strict=True):
                self.last = _record(self._parts, step, loss, grad_norm, seconds)
                if evaluate is not None and step is sent[-1][0][-1]:
                    found = dict(evaluate())
                    loss_of, perplexity = found.pop("loss"), found.pop("perplexity", None)
                    self.last = replace(
                        self.last, eval_loss=loss_of, eval_perplexity=perplexity, eval_metrics=found or None
                    )
                if not (math.isfinite(loss) and math.isfinite(grad_norm)) and self._parts.nonfinite != "skipped":
                    raise _diverged(loss, grad_norm, step=step.number, why=_why(step.number, step.lr))
                self._reporters = [each for each in self._reporters if _report(each, self.last)]


def _why(step: int, lr: float) -> str:
    return f"the learning rate was {lr:.3g}; the weights are still those of step {step - 1}"


def _diverged(loss: float, grad_norm: float, *, step: int, why: str) -> GradientError:
    return GradientError(
        f"training diverged: loss {loss:.4g}, gradient norm {grad_norm:.4g}",
        at=f"step {step}",
        why=why,
        fix="lower optimizer.lr, raise optimizer.schedule.warmup_steps, or use a wider model.dtype",
    )


def _report(reporter: Reporter, record: StepRecord) -> bool:
    """Returns whether the reporter accepted the record. An error of a reporter does not end the run."""
    try:
        reporter.report(record)
    except Exception as error:  # noqa: BLE001 - a full disk, or what a tracker or a callback of the user's raises
        logger.warning("%s ends at step %d, training goes on: %s", type(reporter).__name__, record.step, error)
        return False
    return True


def _run_step(parts: TrainingComponents, step: int, *, lr: float, factor: float, max_grad_norm: float | None) -> _Step:
    started = time.perf_counter()
    lr *= factor
    for group in parts.optimizer.param_groups:  # a group with a rate of its own keeps its ratio to the others
        if "lr_ratio" not in group:
            group["lr_ratio"] = float(group["lr"]) / float(parts.optimizer.defaults["lr"])
        own = lr * group["lr_ratio"]
        if isinstance(group["lr"], torch.Tensor):  # which a compiled step reads
            group["lr"].fill_(own)
        else:
            group["lr"] = own
    batch = next(parts.batches, None)
    if batch is None:
        raise BatchError(
            f"the batches end before step {step}",
            why="a run takes as many batches as it has steps",
            fix="give it an iterator that restarts at its end, or take fewer steps",
        )
    result = parts.step(batch)
    # An infinite bound changes nothing, and the norm is worth knowing all the same.
    grad_norm = torch.as_tensor(parts.clip(math.inf if max_grad_norm is None else max_grad_norm))
    why = _why(step, lr)
    if parts.nonfinite == "checked":
        loss, norm = float(result.loss), float(grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise _diverged(loss, norm, step=step, why=why)
    try:
        parts.optimizer.step()
    except GradientError as error:
        why = f"{why}\n{error.why}" if error.why else why
        raise _diverged(float(result.loss), float(grad_norm), step=step, why=why) from error
    parts.optimizer.zero_grad(set_to_none=True)
    return _Step(number=step, lr=lr, result=result, grad_norm=grad_norm.detach(), seconds=time.perf_counter() - started)


def _record(parts: TrainingComponents, step: _Step, loss: float, grad_norm: float, seconds: float) -> StepRecord:
    rate, peak = step.result.flops / seconds / parts.num_devices, _peak_flops(parts.device)
    return StepRecord(
        step=step.number,
        loss=loss,
        lr=step.lr,
        grad_norm=grad_norm,
        tokens=step.result.num_tokens,
        tokens_per_second=step.result.num_tokens / seconds,
        memory_bytes=peak_memory_bytes(parts.device),
        reserved_bytes=torch.cuda.max_memory_reserved(parts.device) if parts.device.type == "cuda" else None,
        tflops=rate / 1e12 if rate else None,
        mfu=rate / peak if rate and peak else None,
    )


@functools.cache
def _peak_flops(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory so far, in bytes: allocated on a GPU, or of the process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
