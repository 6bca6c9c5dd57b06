"""Compares a split model with the unsplit one: loss, logits, every gradient, parameters after steps, replicas."""

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import all_gather_objects
from shardwise.errors import VerificationError, counted
from shardwise.mesh import Mesh
from shardwise.optim.optimizer import build_optimizer
from shardwise.parameters.canonical import canonical_tensors
from shardwise.parameters.registry import find_parameters, registry_of
from shardwise.parameters.replicas import find_unequal_replicas
from shardwise.plan.decision import ParameterPlan, split_share, table
from shardwise.plan.spec import star_numbers
from shardwise.plan.structure import is_within, outermost_layers
from shardwise.proof.counting import counted_layers
from shardwise.proof.draws import RecordRandom, ReplayRandom
from shardwise.sharding.placement import Split
from shardwise.tiny.inputs import clone_batch, loss_or_surrogate
from shardwise.tiny.models import fork_all_rng, training_copy
from shardwise.topology.shape import DATA_AXES

OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "eps": 1e-6}
"""Of the compared AdamW steps. With its default `eps` Adam blows gradients that are zero but for rounding (a key bias:
the softmax does not see it) up to full steps in a direction that the noise decides; `eps` is set above that noise."""

_COMPARED_STEPS = 3

_OUTPUTS = ("last_hidden_state", "pooler_output")

_TIMES, _FLOOR = 2.0, 2e-3
"""In the dtype of the run the split's error may be twice the unsplit model's, plus a floor of what is compared."""

Splitter = Callable[[nn.Module, Mesh], nn.Module]
Step = Callable[[nn.Module, Mesh, Mapping[str, Any]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed differences between a split model and the unsplit model.

    Attributes:
        loss: absolute.
        logits: absolute.
        gradient: relative to the largest entry of the gradient in question, plus `gradient_floor` absolute.
        parameter: absolute, after the optimizer's steps.
    """

    loss: float = 1e-5
    logits: float = 1e-4
    gradient: float = 1e-4
    gradient_floor: float = 1e-6
    parameter: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest difference over named tensors, its tensor, and the allowed difference.

    Attributes:
        num_compared: number of compared tensors.
        num_draws: number of random tensors, such as dropout masks, that both models shared.
    """

    error: float
    allowed: float
    name: str = ""
    num_compared: int = 1
    num_draws: int = 0

    @property
    def passed(self) -> bool:
        """Whether the difference is allowed. NaN never is."""
        return self.error <= self.allowed


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result of `measure`.

    Attributes:
        unequal_replicas: names of parameters whose copies on several ranks are not bit-equal after the last step.
        share_split: share of all elements that belong to split parameters.
        block_share: the same for the layers' parameters that the batch reaches.
        collectives_per_layer: collectives in forward and in backward per run of a layer; None if no layer ran (see
            `shardwise.proof.counting`).
        replicated: matrices in layers that every rank replicates, each with the reason.
        num_steps: optimizer steps after which the replicas were compared.
        split_seconds: time of splitting on this rank, including the search for the plan.
        in_training: loss and every gradient of a second run with padding and dropout; None if there was none.
        narrow: relative error of all gradients of a step in the dtype of the run; None if it is the dtype of the proof.
    """

    loss: Difference
    logits: Difference
    gradient: Difference
    parameter: Difference
    unequal_replicas: tuple[str, ...]
    share_split: float
    block_share: float
    collectives_per_layer: tuple[float, float] | None
    replicated: tuple[str, ...]
    num_steps: int
    split_seconds: float
    in_training: Difference | None = None
    narrow: Difference | None = None

    @property
    def passed(self) -> bool:
        """Whether the split model computes the same as the unsplit one."""
        differences = [value for value in vars(self).values() if isinstance(value, Difference)]
        return all(each.passed for each in differences) and not self.unequal_replicas


def measure(
    unsplit: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    *,
    split: Splitter,
    step: Step,
    reference_loss: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None,
    tolerance: Tolerance = Tolerance(),
    num_steps: int = 20,
) -> Measurement:
    """Trains `unsplit` and a split copy on the same `batch`. Every rank of `mesh` calls this with equal arguments.

    Args:
        step: runs forward and backward of a split model and returns the loss.
        reference_loss: computes the unsplit model's loss; default: `loss_or_surrogate` of its output.
        num_steps: number of AdamW steps after which the replicas are compared. Parameters are compared after three.
    """
    reference, start = copy.deepcopy(unsplit), time.perf_counter()
    model = split(copy.deepcopy(unsplit), mesh)
    split_seconds = time.perf_counter() - start
    expected_outputs, outputs = _outputs(reference, batch), _outputs(model, batch)
    loss_of = reference_loss or (lambda model, batch: loss_or_surrogate(model(**batch)))
    expected_loss = loss_of(reference, clone_batch(batch))
    expected_loss.backward()
    with counted_layers(model, mesh) as collectives:
        loss = step(model, mesh, clone_batch(batch))
    gradients, expected = _gradients(model), _own_gradients(reference)
    plan = registry_of(model).plan
    layers = outermost_layers(plan.stacks)
    in_layers = {fqn: each for fqn, each in plan.parameters.items() if is_within(fqn, layers)}
    steps = functools.partial(step, model, mesh), lambda batch: loss_of(reference, batch).backward()
    parameter = _parameters_apart(model, reference, batch, steps, num_steps, tolerance.parameter)
    return Measurement(
        loss=Difference(error=abs(float(loss) - float(expected_loss.detach())), allowed=tolerance.loss),
        logits=_worst(outputs, expected_outputs, 0.0, tolerance.logits),
        gradient=_worst(gradients, expected, tolerance.gradient, tolerance.gradient_floor),
        parameter=parameter,
        unequal_replicas=find_unequal_replicas(model),
        share_split=split_share(plan.parameters.values()),
        block_share=split_share(each for fqn, each in in_layers.items() if fqn in expected),
        collectives_per_layer=collectives.per_run,
        replicated=_replicated_matrices(in_layers),
        num_steps=num_steps,
        split_seconds=split_seconds,
    )


def _parameters_apart(
    model: nn.Module,
    reference: nn.Module,
    batch: Mapping[str, Any],
    steps: Sequence[Callable[[Mapping[str, Any]], Any]],
    num_steps: int,
    allowed: float,
) -> Difference:
    """Difference of both models' parameters after three AdamW steps. The split model continues to `num_steps`."""
    reference_optimizer = torch.optim.AdamW(reference.parameters(), **OPTIMIZER)
    optimizers = reference_optimizer, build_optimizer(model, torch.optim.AdamW, **OPTIMIZER)
    parameter = Difference(error=0.0, allowed=allowed)
    for number in range(num_steps):
        if number:
            steps[0](clone_batch(batch))
            if number < _COMPARED_STEPS:
                steps[1](clone_batch(batch))
        for optimizer in optimizers[: 2 if number < _COMPARED_STEPS else None]:
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == _COMPARED_STEPS:
            parameter = _worst(_parameters(model), dict(reference.named_parameters()), 0.0, allowed)
    return parameter


def measure_in_training(
    full: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    *,
    split: Splitter,
    step: Step,
    loss_of: Callable[[nn.Module, Mapping[str, Any], Sequence[ReplayRandom]], Tensor],
    drops: bool = True,
    tolerance: Tolerance = Tolerance(),
) -> Difference | None:
    """Trains a split copy of `full` with dropout for one step, and `full` with the ranks' dropout masks combined.

    Returns the largest difference of loss and gradients, or a difference that names masks that cannot be combined; None
    if `full` cannot be trained on `batch`. Runs without dropout if `full` cannot be trained with it.

    Args:
        batch: one row for each forward.
        loss_of: computes the loss of the full model, given the draws of each data rank.
        drops: train with dropout; False: train in the model's current mode.

    Communicates: the draws, over pp, tp and the data ranks.
    """
    reference = training_copy(full, batch, drops=drops)
    if reference is None:
        return None
    model = split(copy.deepcopy(reference), mesh)
    with fork_all_rng():
        with RecordRandom(registry_of(model).stages) as draws:
            loss = step(model, mesh, clone_batch(batch))
        # One stage per rank, each by its forwards: by microbatch, they are in the unsplit model's order.
        microbatches = zip(*all_gather_objects(draws.forwards, mesh.group("pp")), strict=True)
        drawn = [value for of_stages in microbatches for values in of_stages for value in values]
        on_tp = all_gather_objects((drawn, torch.get_rng_state()), mesh.group("tp"))
    given = [
        ReplayRandom([drawn for drawn, _ in ranks], [state for _, state in ranks if drops])
        for ranks in all_gather_objects(on_tp, mesh.group(*DATA_AXES))
    ]

    with fork_all_rng():
        expected_loss = loss_of(reference, clone_batch(batch), given)
    expected_loss.backward()
    expected = {"loss": expected_loss.detach(), **_own_gradients(reference)}
    worst = _worst({"loss": loss, **_gradients(model)}, expected, tolerance.gradient, tolerance.gradient_floor)
    problems = [problem for each in given for problem in (each.problems if worst.passed else each.faults)]
    if problems:
        return Difference(error=float("inf"), allowed=tolerance.gradient, name=problems[0])
    return replace(worst, num_draws=sum(redraws.num_draws for redraws in given))


def measure_narrow(
    full: nn.Module,
    exact: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    split: Splitter,
    step: Step,
    loss_of: Callable[[nn.Module, Mapping[str, Any]], Tensor],
) -> Difference:
    """Returns the relative error of all gradients of a split model that computes in `dtype`, against `exact`.

    The bound is twice the error of the unsplit model in the same dtype.

    Args:
        full: the model in float32.
        exact: the same weights in float64, or in float32.
        split: splits a float32 copy so that it computes in `dtype`.
    """
    exact, reference = copy.deepcopy(exact), copy.deepcopy(full).to(dtype)
    model = split(copy.deepcopy(full), mesh)
    loss_of(exact, in_dtype(batch, next(exact.parameters()).dtype)).backward()
    loss_of(reference, clone_batch(batch)).backward()
    step(model, mesh, clone_batch(batch))
    found, truth = _gradients(model), _own_gradients(exact)
    allowed = _TIMES * _distance(_own_gradients(reference), truth) + _FLOOR
    return Difference(error=_distance(found, truth), allowed=allowed, name=str(dtype).removeprefix("torch."))


def runs_in_float64(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Returns whether a model trains in float64, unlike grouped products, ProphetNet's masks and Switch's routers."""
    wide = copy.deepcopy(model).double()
    try:
        loss = loss_or_surrogate(wide(**in_dtype(batch, torch.float64)))
        loss.backward()
    except Exception:  # noqa: BLE001 - the model's own code fails in any way
        return False
    return bool(loss.isfinite()) and all(
        x.dtype == torch.float64 or not x.is_floating_point() for x in wide.parameters()
    )


def in_dtype(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns a copy of the batch with its floating-point tensors in `dtype`."""
    cast = {name: x.to(dtype) for name, x in batch.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return clone_batch(batch) | cast


def _distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Norm of the difference of all tensors, relative to the norm of the exact ones; a missing tensor counts as 0."""
    off = {name: value - found[name].to(value) if name in found else value for name, value in exact.items()}
    wrong, total = (sum(float(value.square().sum()) for value in each.values()) for each in (off, exact))
    return (wrong / max(total, 1e-30)) ** 0.5


def _own_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _replicated_matrices(planned: Mapping[str, ParameterPlan]) -> tuple[str, ...]:
    whole = {
        fqn: each for fqn, each in planned.items() if len(each.shape) > 1 and not isinstance(each.placement, Split)
    }
    reasons = {star_numbers(fqn): each.rule.meaning for fqn, each in whole.items()}
    return tuple(f"{name}: {reason}" for name, reason in reasons.items())


def _outputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the model's outputs besides its loss, on the CPU."""
    with torch.no_grad():
        output = model(**clone_batch(batch))
    found = {}
    for name, value in output.items():
        if name in _OUTPUTS or (isinstance(value, Tensor) and "logits" in name):
            found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
    return found


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return _full(model, {name: value.detach() for name, value, _ in find_parameters(model)})


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return _full(model, {name: value.grad for name, value, _ in find_parameters(model) if value.grad is not None})


def _full(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: full for name, full in canonical_tensors(model, values) if full is not None}


def _worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float, absolute: float) -> Difference:
    """Returns the difference that is largest relative to its allowed value."""
    if one_sided := sorted(found.keys() ^ expected.keys()):
        name = f"{one_sided[0]}, which only the {'split' if one_sided[0] in found else 'unsplit'} model has"
        return Difference(error=float("inf"), allowed=absolute, name=name)
    worst = Difference(error=0.0, allowed=absolute, num_compared=len(expected))
    for name in sorted(expected):
        value, want = found[name].detach().double().cpu(), expected[name].detach().double().cpu()
        if value.shape != want.shape:
            return Difference(error=float("inf"), allowed=absolute, name=f"{name} {list(value.shape)}")
        if not want.numel():
            continue
        error = float((value - want).abs().max())
        allowed = relative * float(want.abs().max()) + absolute
        if not error / allowed <= worst.error / worst.allowed:
            worst = replace(worst, error=error, allowed=allowed, name=name)
        if error != error:
            return worst
    return worst


_LABELS = {
    "loss": "loss",
    "logits": "logits",
    "gradient": "worst gradient",
    "parameter": "parameters, 3 steps",
    "in_training": "padding",
    "narrow": "in {}",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of proving a split; `str` is the table.

    Attributes:
        not_given: image, video and sound arguments that the model takes and did not receive.
        without_dropout: reason why nothing was dropped, if so.
    """

    subject: str
    layout: str
    measurements: tuple[Measurement, ...]
    seconds: float
    not_given: tuple[str, ...] = ()
    without_dropout: str = "nothing draws random numbers"

    @property
    def passed(self) -> bool:
        """Whether every rank computes the same as the unsplit model."""
        return all(found.passed for found in self.measurements)

    @property
    def share_split(self) -> float:
        """Share of all bytes that belong to split parameters."""
        return self.measurements[0].share_split

    def raise_if_failed(self) -> None:
        """Raises `VerificationError` with the table unless the proof passed."""
        if not self.passed:
            raise VerificationError(
                f"{self.subject} over {self.layout} does not compute what the unsplit model does", why=str(self)
            )

    def __str__(self) -> str:
        rows = [("", "largest difference", "allowed", "verdict", "where")]
        for name in _LABELS:
            found = [getattr(each, name) for each in self.measurements]
            if found[0] is None:
                rows += [("padding", "not tried", "", "", "it cannot be trained on it")] * (name == "in_training")
                continue
            rows.append(_row(name, found))
            if name == "in_training" and not found[0].num_draws:
                rows.append(("dropout", "not tried", "", "", self.without_dropout))
        unequal = sorted({name for found in self.measurements for name in found.unequal_replicas})
        differing = f"{len(unequal)} unequal after {counted(self.measurements[0].num_steps, 'step')}"
        rows.append(("replicas", differing, "0", _verdict(not unequal), ", ".join(unequal)))
        verdict = "equal to the unsplit model" if self.passed else "NOT equal to the unsplit model"
        if self.not_given:
            verdict += f", without {' and '.join(self.not_given)}, which it was not given"
        return "\n".join(
            [
                f"{self.subject} over {self.layout}: {verdict}",
                "",
                *table(rows, has_rule=False),
                "",
                f"{self.share_split:.1%} of the tiny model's parameters are split; proved in {self.seconds:.1f} s",
            ]
        )


def _row(name: str, found: list[Difference]) -> tuple[str, str, str, str, str]:
    worst = max(found, key=lambda each: each.error / each.allowed if each.error == each.error else float("inf"))
    where = "of all gradients, relative to their norm" if name == "narrow" else worst.name
    label = _LABELS[name].format(worst.name)
    if not worst.num_compared:
        return label, "not compared", "", "", "neither model returns any"
    if worst.num_draws:
        label, where = f"{label}, dropout", f"{where} ({counted(worst.num_draws, 'draw')} alike)".lstrip()
    return label, f"{worst.error:.1e}", f"{worst.allowed:.1e}", _verdict(worst.passed), where


def _verdict(passed: object) -> str:
    return "ok" if passed else "FAILED"
