"""Which plan a model gets: declared and proved, or derived from its structure and tried on simulated ranks.

The user's rules come on top of an automatic plan. For families that the test suite proves this is what transformers
declares, corrected by us. Any other architecture is examined once: a tiny model of it is built, what transformers
declares is tried, what the structure implies is derived and tried, and the plan that passes and splits most is kept, on
disk too, for this version of transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError, ShardwiseError
from shardwise.parallel.adapter_facts import without_adapters
from shardwise.parallel.declared_plans import declared_plan, read_request, vocabulary_plan
from shardwise.parallel.facts import read_facts
from shardwise.plan.families import PROVED
from shardwise.plan.fit import idle_rules
from shardwise.plan.options import ParallelSpec
from shardwise.plan.rule import Rule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts
from shardwise.proof.draws import seeded
from shardwise.runtime.modes import has_dropout
from shardwise.search.deriving import Derivation, derive_plan

__all__ = ["plan_for"]

logger = logging.getLogger("shardwise.plan")

_SEARCH = 4
"""Raised with every change of what the search for a plan finds, so that plans of older code are not used again."""

_MAX_SHOWN = 4

_VOLATILE = ("_name_or_path", "name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures")


def plan_for(model: nn.Module, spec: ParallelSpec, *, tp_size: int, facts: ModelFacts | None = None) -> Plan:
    """All rules for `model`, later ones over earlier ones.

    Args:
        spec: whose plan is "auto" as above; "declared", which takes what transformers declares, untried; "derived",
            which derives again; or rules on top of the automatic ones.
        facts: the model's, where they have been read.

    Raises:
        PlanError: nothing is declared, nothing can be derived, and the user gives no rules.
    """
    kind, own = read_request(spec.plan)
    if tp_size == 1:
        return own
    facts = facts or read_facts(model)
    vocabulary, declared = vocabulary_plan(facts), declared_plan(model, facts)
    idle = idle_rules(declared, facts)
    if kind == "declared" and idle:
        raise _idle(model, declared, idle)
    if kind == "declared" or (kind == "auto" and facts.model_type in PROVED and declared.rules and not idle):
        if not declared.rules and not own.rules:
            raise _unknown(model, "transformers declares none for it")
        return vocabulary | declared | own
    if idle:
        logger.warning("%s", _idle(model, declared, idle).summary)
    automatic = vocabulary | declared
    try:
        derived = _examined(
            without_adapters(model),
            automatic,
            tp_size=tp_size,
            sequence_parallel=spec.sequence_parallel,
            use_cache=kind != "derived",
        )
        automatic = derived.plan
        if derived.problem is not None:
            raise derived.problem
    except ShardwiseError as error:
        if not own.rules and isinstance(error, PlanError):
            raise  # it says itself what does not fit
        if not own.rules:
            raise (_idle(model, declared, idle) if idle else _unknown(model, str(error))) from error
    return automatic | own


def _idle(model: nn.Module, declared: Plan, idle: Sequence[Rule]) -> PlanError:
    """The error for a plan that is declared for other modules than the model's."""
    shown = list(idle[:_MAX_SHOWN])
    return PlanError(
        f"{len(idle)} of the {len(declared.rules)} rules declared for {type(model).__name__} split nothing in it",
        at="\n".join(f'rule "{rule.pattern}: {rule.style}" ({rule.source})' for rule in shown)
        + (f"\nand {len(idle) - _MAX_SHOWN} more" if len(idle) > _MAX_SHOWN else ""),
        why="its modules have other names, or hold others that have the weights: it is wrapped, or adapters were added",
        fix="split the model itself, before anything is put around it or into it, or give rules with its names",
    )


def _unknown(model: nn.Module, why: str) -> PlanError:
    return PlanError(
        f"no tensor-parallel plan is known for {type(model).__name__}",
        why=why,
        fix='give rules, such as plan={"**.q_proj": "colwise", "**.o_proj": "rowwise"}; see shardwise.plan.spec.STYLES',
    )


def _examined(
    model: nn.Module, declared: Plan, *, tp_size: int, sequence_parallel: bool, use_cache: bool
) -> Derivation:
    path = _cache_path(model, declared, tp_size=tp_size, sequence_parallel=sequence_parallel)
    if path is not None and use_cache and path.is_file():
        try:
            return Derivation(plan=Plan.from_json(json.loads(path.read_text())))
        except (ValueError, OSError):
            logger.warning("ignoring the damaged plan at %s", path)
    with seeded():  # one rank plans, and its streams of random numbers must stay those of the others
        derived = derive_plan(model, declared, tp_size=tp_size, sequence_parallel=sequence_parallel)
    if path is not None and derived.problem is None:
        _keep(path, derived.plan)
    return derived


def _cache_path(model: nn.Module, declared: Plan, *, tp_size: int, sequence_parallel: bool) -> Path | None:
    """Where the plan of this architecture at this size is kept; None for classes that have no lasting name."""
    if not isinstance(model, PreTrainedModel) or not type(model).__module__.startswith("transformers."):
        return None
    config: dict[str, Any] = model.config.to_dict()
    described = {
        "search": _SEARCH,
        "class": type(model).__qualname__,
        "modules": [(name, type(module).__name__) for name, module in model.named_modules()],
        "drops": has_dropout(model),
        "attention": getattr(model.config, "_attn_implementation", None),
        "config": {name: value for name, value in config.items() if name not in _VOLATILE},
        "declared": str(declared),
        "tp_size": tp_size,
        "sequence_parallel": sequence_parallel,
        "versions": [version("shardwise"), transformers.__version__, torch.__version__],
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
    return Path(constants.HF_HOME) / "shardwise" / "plans" / f"{model.config.model_type}-{digest[:20]}.json"


def _keep(path: Path, plan: Plan) -> None:
    """Writes the plan to a directory next to the hub's cache; if that fails, it is derived again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        partial.write_text(json.dumps(plan.to_json(), indent=1))
        partial.replace(path)
    except OSError as error:
        logger.info("cannot keep the derived plan: %s", error)
