"""Deriving a plan: a twin is watched, its blocks are tried one kind after another, the best plan that passes wins."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.trial import Trial, copied
from shardwise.errors import PlanError, UnsupportedError
from shardwise.layout.placement import Split
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan, Rule
from shardwise.plan.structure import ModelFacts
from shardwise.proof.twins import build_twin, make_batch, randomize, settle, shrink_config
from shardwise.split.derive import Block, find_blocks
from shardwise.split.facts import read_facts
from shardwise.split.generalize import generalize
from shardwise.split.influence import find_row_products
from shardwise.split.plans import vocabulary_plan
from shardwise.split.trace import layers_of

__all__ = ["derive_plan"]

logger = logging.getLogger("shardwise.plan")

_SMALL_ENOUGH = 8_000_000
"""Elements up to which a model is its own twin, so that even parts spelled out element by element fit it."""
_WELL_SPLIT = 0.9


def derive_plan(model: nn.Module, declared: Plan, *, tp_size: int, sequence_parallel: bool = False) -> Plan:
    """The rules that split most of `model` and compute what it computes, tried on simulated ranks.

    Args:
        model: a transformers model, real or meta, whole.
        declared: what is known already; kept where it passes.

    Raises:
        PlanError: no plan at all passes.
        UnsupportedError: no twin of the model can be built.
    """
    twin = _build_twin(model)
    batch = make_batch(twin, seed=0)
    settle(twin, batch)
    trial = Trial(copied(twin), batch, parts=tp_size)
    facts = read_facts(twin)
    layers = tuple(layers_of(twin))
    best: tuple[float, Plan] | None = None
    reasons: list[str] = []
    for plan in _candidates(twin, facts, trial, declared, tp_size):
        share = _share(plan, facts, layers, tp_size)
        if best is not None and share <= best[0]:
            continue
        verdict = trial.run(plan, sequence_parallel=sequence_parallel)
        if verdict.passed:
            best = (share, plan)
        reasons.append(verdict.reason)
        if best is not None and best[0] >= _WELL_SPLIT:
            break
    if best is None:
        what = "be split along the sequence" if sequence_parallel else f"be split over tp={tp_size}"
        raise PlanError(
            f"{type(model).__name__} cannot {what}: no declared or derived plan computes what the whole model does",
            why="; ".join(dict.fromkeys(reason for reason in reasons if reason)),
            fix="use sequence_parallel=False" if sequence_parallel else "use tp_size 1, or give rules of your own",
        )
    return generalize(best[1], twin, model)


def _build_twin(model: nn.Module) -> nn.Module:
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{type(model).__name__} is no transformers model", why="no twin of it can be built")
    small = sum(parameter.numel() for parameter in model.parameters()) <= _SMALL_ENOUGH
    if small and not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        twin = copy.deepcopy(model).float().eval()
        randomize(twin, torch.Generator().manual_seed(0))
    else:
        config = _without_dropout(model.config) if small else shrink_config(model.config, without_dropout=True)
        twin = build_twin(config, type(model), seed=0).eval()
    return twin


def _eager(twin: nn.Module) -> nn.Module:
    """A copy that computes attention and experts step by step, where the graph shows every dependence."""
    copied_twin = copy.deepcopy(twin)
    for choose in ("set_attn_implementation", "set_experts_implementation"):
        try:
            getattr(copied_twin, choose)("eager")
        except (AttributeError, ValueError):  # it has no such choice: what it has is what is watched
            continue
    return copied_twin


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    silent = copy.deepcopy(config)
    for part in (silent, *(getattr(silent, name) for name in silent.sub_configs)):
        for name, value in vars(part).items() if part is not None else ():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                vars(part)[name] = 0.0
    return silent


def _candidates(twin: nn.Module, facts: ModelFacts, trial: Trial, declared: Plan, tp_size: int) -> Iterator[Plan]:
    """Plans worth a try: what is declared, what is declared and more, what is derived alone."""
    passes = bool(declared.rules) and trial.run(declared).passed
    if passes:
        yield declared
    products, layers = find_row_products(_eager(twin), trial.inputs(), parts=tp_size)
    blocks = find_blocks(twin, facts, products, layers, parts=tp_size)
    if passes:
        covered = {fqn for fqn, planned in _resolved(declared, facts, tp_size).items() if isinstance(planned, Split)}
        rest = Plan(())
        for alike in _kinds([block for block in blocks if not block.parameters & covered]):
            rest |= _first_that_passes(alike, trial)
        yield declared | rest
    vocabulary = vocabulary_plan(facts)
    if vocabulary.rules and not trial.run(vocabulary).passed:
        vocabulary = Plan(())
    derived = _unreached(facts, blocks, tuple(layers_of(twin)))
    for alike in _kinds(blocks):
        derived |= _first_that_passes(alike, trial)
    yield vocabulary | derived
    yield vocabulary


def _unreached(facts: ModelFacts, blocks: Sequence[Block], layers: Sequence[str]) -> Plan:
    """What to say of matrices in layers that no block was found for."""
    reached = frozenset[str]().union(*(block.parameters for block in blocks))
    reason = "no product in its layer needs just a part of it"
    return Plan(
        tuple(
            Rule(fqn, "replicate", source="structure", reason=reason)
            for fqn, _, _, shape in facts.parameters()
            if len(shape) > 1 and fqn not in reached and any(fqn.startswith(f"{layer}.") for layer in layers)
        )
    )


def _kinds(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks of the same kind in the layers of one stack, which are tried together: they may depend on each other."""
    kinds: dict[tuple[str, tuple[str, ...]], list[Block]] = {}
    for block in blocks:
        kinds.setdefault((block.layer.rpartition(".")[0], block.key), []).append(block)
    return list(kinds.values())


def _first_that_passes(alike: Sequence[Block], trial: Trial) -> Plan:
    """The rules of blocks of one kind with the first guess of attributes that passes; none where no guess does."""
    plans = [list(block.plans()) for block in alike]
    reason = ""
    for index in range(max(map(len, plans))):
        together = Plan(())
        for guesses in plans:
            together |= guesses[min(index, len(guesses) - 1)]
        verdict = trial.run(together)
        if verdict.passed:
            return together
        reason = verdict.reason
    names = sorted(alike[0].parameters)
    logger.info("%s stays whole: %s", ", ".join(names[:3]), reason)
    return Plan(
        tuple(Rule(name, "replicate", source="structure", reason=f"no split passes: {reason}") for name in names)
    )


def _resolved(plan: Plan, facts: ModelFacts, tp_size: int) -> dict[str, Any]:
    return {fqn: planned.placement for fqn, planned in resolve(plan, facts, tp_size=tp_size).parameters.items()}


def _share(plan: Plan, facts: ModelFacts, layers: Sequence[str], tp_size: int) -> float:
    """Elements of the layers' split parameters over all of the layers' elements."""
    shapes = {fqn: shape for fqn, _, _, shape in facts.parameters()}
    inside = {
        fqn: placement
        for fqn, placement in _resolved(plan, facts, tp_size).items()
        if any(fqn.startswith(f"{layer}.") for layer in layers)
    }
    total = sum(math.prod(shapes[fqn]) for fqn in inside)
    return sum(math.prod(shapes[fqn]) for fqn, place in inside.items() if isinstance(place, Split)) / max(1, total)
