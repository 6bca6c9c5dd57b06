"""Tries a split: trains a tiny model on simulated ranks and compares it with the full one, in milliseconds."""

import copy
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.comm.simulated import SimulatedGroup, run_ranks
from shardwise.data.batch import split_rows
from shardwise.errors import PlanError, ShardwiseError, UnsupportedError, one_line
from shardwise.lora.inject import inject_alike
from shardwise.mesh import Blocks, Mesh
from shardwise.optim.gradients import track_gradients
from shardwise.parallel.apply import Model, apply_plan, move_model
from shardwise.parallel.build import has_meta
from shardwise.parallel.facts import decide_split, read_facts, read_stacks
from shardwise.parameters.canonical import canonical_tensor
from shardwise.parameters.registry import registry_of
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.plan.regions import NoStackError
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, outermost_layers
from shardwise.probe.disk_cache import cache_path, read, write
from shardwise.proof.draws import RecordRandom, ReplayRandom
from shardwise.runtime.adapter_facts import without_adapters
from shardwise.runtime.modes import has_dropout
from shardwise.tiny.families import read_field
from shardwise.tiny.inputs import add_media, clone_batch, loss_or_surrogate
from shardwise.tiny.models import (
    build_tiny_model,
    fork_all_rng,
    make_batch,
    perturb_parameters,
    set_dropout,
    set_runnable_mode,
    shrink_config,
    training_copy,
)
from shardwise.tiny.shrink import apply_repeatable
from shardwise.topology.shape import MeshShape

ITEM = re.compile(r"(?<![^.])(expert_)?\d+(?![^.])")  # name of an item of a list, or of a dictionary: "0", "expert_0"

_MAX_LAYERS = 6  # with which a tiny model is tried to have layers of every kind

_SMALL_ENOUGH = 8_000_000  # elements of a model that is its own tiny model, so that parts given one by one fit it


def trial_of(tiny: PreTrainedModel, *, num_parts: int, drops: bool, with_media: bool = True) -> "Trial":
    """Builds the trial of plans on `tiny`, the result of `build_tried_model`, over `num_parts` simulated ranks.

    `with_media`: give it images and sound beside tokens, as far as they can be made.
    """
    batch, padded = make_batch(tiny, seed=0), split_rows(make_batch(tiny, seed=0, padding="right"), 2, 2)[1]
    if with_media:
        batch, padded = (add_media(tiny, each, seed=0) for each in (batch, padded))
    set_runnable_mode(tiny, batch)

    def explain(verdict: Verdict) -> PlanError:
        own = tiny.config.get_text_config()
        sizes = (f"{name} {read_field(own, name)}" for name in ("hidden_size", "num_attention_heads", "head_dim"))
        return PlanError(
            f"{type(tiny).__name__} does not run unsplit, so nothing shows how to split it",
            at=verdict.module or None,
            why=f"{verdict.reason}\n(tried with {', '.join(sizes)} and tokens [2, 16])",
            fix="correct the sizes in its config until it runs, or give rules of your own",
        )

    with reraise_as(explain):
        return Trial(tiny, batch, num_parts=num_parts, padded=padded, drops=drops)


def is_small(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) <= _SMALL_ENOUGH


def build_tried_model(model: PreTrainedModel, **shrinking: Any) -> PreTrainedModel:
    """Returns a perturbed copy of the model; of a large one, a tiny model by `shrink_config` with these options."""
    own_size = is_small(model)
    if own_size and not has_meta(model):
        # Whatever the caller trains, and where.
        tiny = move_model(copy.deepcopy(model), "cpu").float().eval().requires_grad_()
        set_dropout(tiny, 0.0)
        apply_repeatable(tiny.config)
        perturb_parameters(tiny, torch.Generator().manual_seed(0))
        return tiny
    if own_size:
        return build_tiny_model(apply_repeatable(copy.deepcopy(model.config)), type(model), seed=0).eval()

    def build(num_layers: int) -> PreTrainedModel:
        config = shrink_config(model.config, without_dropout=True, **{"num_layers": num_layers, **shrinking})
        return build_tiny_model(config, type(model), seed=0).eval()

    return smallest_with_all_layer_kinds(build, model)


def smallest_with_all_layer_kinds(build: Callable[[int], Model], model: nn.Module) -> Model:
    """Returns `build(num_layers)` with the fewest layers that cover every kind in `model`; with two if none does."""

    def kinds(model: nn.Module) -> set[tuple[str, frozenset[str]]]:
        return {layer_kind(layer, names_in(model, layer)) for layer in outermost_layers(read_stacks(model))}

    wanted, tried = kinds(model), map(build, range(2, _MAX_LAYERS + 1))
    first = next(tried)
    return next((few for few in itertools.chain((first,), tried) if wanted <= kinds(few)), first)


def layer_kind(layer: str, names: frozenset[str]) -> tuple[str, frozenset[str]]:
    """Returns the kind of a layer: its stack, and the names inside it, whatever the length of lists."""
    return layer.rpartition(".")[0], frozenset(ITEM.sub(r"\1*", name) for name in names)


def names_in(model: nn.Module, layer: str) -> frozenset[str]:
    """Returns the names of a layer's parameters and of the modules that own them, relative to the layer."""
    module = model.get_submodule(layer)
    own = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return frozenset(f".{name}" for each in own for name in (each, each.rpartition(".")[0]) if name)


_LOSS = 1e-4
_GRADIENT = 1e-3
_GRADIENT_FLOOR = 1e-6
_REASON = 200  # letters of an error that are kept


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of trying a plan."""

    passed: bool  # whether loss and every gradient equal the full model's
    reason: str = ""
    module: str = ""  # the innermost one that was running at the failure
    lacks_stack: bool = False  # whether there was no list of layers along which to split the sequence
    num_collectives: int = 0  # in one rank's forward and backward, if it passed


class SimulatedMesh(Mesh):
    """One simulated rank of a tensor-parallel layout on the CPU. It has no `DeviceMesh`, so logits are gathered."""

    def __init__(self, group: SimulatedGroup) -> None:
        shape = MeshShape(tp_size=group.size())
        super().__init__(shape, rank=group.rank(), device=torch.device("cpu"), groups={("tp",): group})
        self._group = group

    def subgroup(self, axis: str, blocks: Blocks) -> SimulatedGroup | None:
        """Returns this rank's simulated group of its block."""
        return self._group.subgroup(blocks)


class Trial:
    """A tiny model, its batch, and the full model's results.

    Args:
        tiny: a model that has not run yet. Every rank gets a copy, because modules may cache results.
        padded: one padded row, for runs in training mode with dropout.
        drops: whether to train with dropout on it. A model that never drops need not be right with dropout.
    """

    def __init__(
        self,
        tiny: nn.Module,
        batch: Mapping[str, Any],
        *,
        num_parts: int,
        padded: Mapping[str, Any] | None = None,
        drops: bool = True,
    ) -> None:
        self.batch, self.num_parts = batch, num_parts
        self._tiny, self._padded, self._drops = tiny, padded, drops
        self._found: dict[tuple[Plan, bool], Verdict] = {}
        self._tiny_training = None if padded is None else training_copy(tiny, padded, drops=drops)
        self.facts = read_facts(tiny)
        self._truth, again = _train(copy.deepcopy(tiny), batch), float(_loss(copy.deepcopy(tiny), batch).detach())
        if abs(again - self._truth.loss) > _LOSS:
            raise UnsupportedError(
                f"{type(tiny).__name__} gives another result in every run",
                why=f"its forward draws random numbers in eval mode too: a loss of {self._truth.loss:.6f}, then "
                f"{again:.6f};\na split cannot be compared with results that change",
                fix="give rules of your own, or use a layout without tp",
            )
        self.gradients = self._truth.gradients

    def run(self, plan: Plan, *, sequence_parallel: bool = False) -> Verdict:
        """Trains the tiny model one step, split by `plan`, and compares.

        Also compares a step on the padded row with dropout, if there is one: the full model must give the same result
        with the ranks' dropout masks.
        """
        spec = ParallelSpec(sequence_parallel=sequence_parallel)
        asked = plan, sequence_parallel
        if asked not in self._found:
            self._found[asked] = self._run(plan, spec)
        return self._found[asked]

    def _run(self, plan: Plan, spec: ParallelSpec) -> Verdict:
        results = self._split(self._tiny, plan, self.batch, spec)
        if isinstance(results, Verdict):
            return results
        reason = next(filter(None, (_difference(each, self._truth) for each in results)), "")
        if reason:
            return Verdict(passed=False, reason=reason)
        if self._tiny_training is not None and self._padded is not None:
            wrong = self._run_in_training(plan, self._tiny_training, self._padded, spec)
            if wrong is not None:
                return replace(wrong, reason=f"with padding and dropout: {wrong.reason}")
        return Verdict(passed=True, num_collectives=results[0].num_collectives)

    def _run_in_training(
        self, plan: Plan, tiny: nn.Module, padded: Mapping[str, Any], spec: ParallelSpec
    ) -> Verdict | None:
        with fork_all_rng():
            results = self._split(tiny, plan, padded, spec)
            if isinstance(results, Verdict):
                return results
            states = [each.random_state for each in results if self._drops]
            redraws = ReplayRandom([each.draws for each in results], states)
            # In eval mode nothing is dropped; what is drawn all the same are weights of modules that a forward makes.
            truth = _train(copy.deepcopy(tiny), padded, redraws if tiny.training else None)
        wrong = [*filter(None, (_difference(each, truth) for each in results))]
        reasons = [*(redraws.faults if wrong else redraws.problems), *wrong]
        return Verdict(passed=False, reason=reasons[0]) if reasons else None

    def _split(
        self, tiny: nn.Module, plan: Plan, batch: Mapping[str, Any], spec: ParallelSpec
    ) -> "list[_Result] | Verdict":
        """Returns the results of each rank for the batch; a verdict if it fails."""

        def rank(group: SimulatedGroup, decided: SplitPlan) -> _Result:
            model, mesh, draws = copy.deepcopy(tiny), SimulatedMesh(group), RecordRandom()
            gradients = track_gradients(model, apply_plan(model, mesh, decided, spec))
            with draws if model.training else nullcontext():
                loss = _loss(model, batch)
            with gradients.no_sync():
                loss.backward()
                num_collectives = group.num_exchanges
            return _Result(
                loss=float(loss.detach()),
                gradients=_full_gradients(model),
                num_collectives=num_collectives,
                draws=draws.values,
                random_state=torch.get_rng_state(),
            )

        try:
            decided = decide_split(plan, tiny, self.facts, MeshShape(tp_size=self.num_parts), spec)
            return run_ranks(functools.partial(rank, decided=decided), self.num_parts)
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on a wrong split
            return verdict_of_exception(error)


@dataclass(frozen=True, kw_only=True)
class _Result:
    """Results of a rank or the full tiny model: loss, gradients, collectives, draws, and random state afterwards."""

    loss: float
    gradients: Mapping[str, Tensor]
    num_collectives: int = 0
    draws: Sequence[Tensor] = ()
    random_state: Tensor = torch.empty(0)  # noqa: RUF009 - frozen


def _train(model: nn.Module, batch: Mapping[str, Any], redraws: ReplayRandom | None = None) -> _Result:
    """Returns the results of the full model, given the ranks' draws."""
    with redraws or nullcontext():
        loss = _loss(model, batch)
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return _Result(loss=float(loss.detach()), gradients=gradients)


def _loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return loss_or_surrogate(model(**clone_batch(batch)))


def _difference(found: _Result, truth: _Result) -> str:
    """Returns the difference of a rank's results from the full tiny model's, in words."""
    if not abs(found.loss - truth.loss) <= _LOSS:
        return f"loss {found.loss:.6f} instead of {truth.loss:.6f}"
    for name, expected in truth.gradients.items():
        error = float((found.gradients[name] - expected).abs().max()) if expected.numel() else 0.0
        allowed = _GRADIENT * float(expected.abs().max()) + _GRADIENT_FLOOR if expected.numel() else 0.0
        if not error <= allowed:
            return f"gradient of {name} off by {error:.1e}, {allowed:.1e} allowed"
    return ""


@contextmanager
def reraise_as(explain: Callable[[Verdict], ShardwiseError]) -> Iterator[None]:
    """Context manager: converts any error of the model's own code by `explain`."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise explain(verdict_of_exception(error)) from error


def verdict_of_exception(error: Exception) -> Verdict:
    """Returns the verdict on a plan with which the model raised `error`."""
    if isinstance(error, ShardwiseError):
        reason = " ".join(str(error).split())  # whole: it ends with the remedy
    else:
        reason = f"{type(error).__name__}: {one_line(error, limit=_REASON)}"
    return Verdict(passed=False, reason=reason, lacks_stack=isinstance(error, NoStackError), module=_running(error))


def _running(error: BaseException) -> str:
    """FQN of the innermost module whose code was running when the error was raised; "" if there was none."""
    running, trace = [], error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        running += [owner] if isinstance(owner, nn.Module) else []
        trace = trace.tb_next
    names = {id(module): name for name, module in running[0].named_modules()} if running else {}
    return next((names[id(module)] for module in reversed(running) if id(module) in names), "")


def _full_gradients(model: nn.Module) -> dict[str, Tensor]:
    registry = registry_of(model)
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        full = canonical_tensor(gradient, registry.entry(name).layout, registry.mesh)
        assert full is not None
        found[name] = full
    return found


logger = logging.getLogger("shardwise.plan")


def try_adapters(model: nn.Module, plan: Plan, facts: ModelFacts, *, num_parts: int, sequence_parallel: bool) -> None:
    """Trains a tiny model with the same adapters, split and unsplit, and compares every gradient.

    Raises `PlanError` if they differ. Caches success on disk. Logs a warning if it cannot be tried. Communicates
    nothing.
    """
    assert facts.adapters is not None
    base = without_adapters(model)
    described = {
        "plan": str(plan),
        "adapters": [str(each) for each in facts.adapters.adapted],
        "copies": {name: places for name, places in facts.adapters.instances.items() if len(places) > 1},
        "num_parts": num_parts,
        "sequence_parallel": sequence_parallel,
    }
    path = cache_path(base, "adapters", described)
    if read(path, bool):
        return
    name = type(base).__name__
    with fork_all_rng():
        try:
            tried = inject_alike(model, build_tried_model(base, num_parts=num_parts))
            verdict = _try(tried, plan, model, num_parts=num_parts, sequence_parallel=sequence_parallel)
            if not verdict.passed:
                alone = build_tried_model(base, num_parts=num_parts)
                plain = _try(alone, plan, model, num_parts=num_parts, sequence_parallel=sequence_parallel)
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way, or PEFT on a tiny model
            reason = str(error) if isinstance(error, ShardwiseError) else verdict_of_exception(error).reason
            logger.warning("adapters of %s cannot be tried: %s", name, reason.splitlines()[0])
            return
    if verdict.passed:
        write(path, described)
    elif plain.passed:
        raise PlanError(
            f"the adapters of {name} give other results, split like their base over tp={num_parts}",
            at=verdict.module or None,
            why=verdict.reason,
            fix="use fsdp instead of tp, or other target_modules, or a rule that replicates what they adapt",
        )
    else:
        logger.warning("adapters of %s cannot be tried: its rules do not fit a tiny model: %s", name, plain.reason)


def _try(tried: nn.Module, plan: Plan, model: nn.Module, *, num_parts: int, sequence_parallel: bool) -> Verdict:
    trial = trial_of(tried, num_parts=num_parts, drops=has_dropout(model))
    return trial.run(plan, sequence_parallel=sequence_parallel)
