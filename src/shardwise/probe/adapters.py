"""Tries adapters with the plan of their base: a tiny model with similar adapters, on simulated ranks."""

import logging

from torch import nn

from shardwise.errors import PlanError, ShardwiseError
from shardwise.lora.inject import inject_alike
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts
from shardwise.probe.disk_cache import cache_path, read, write
from shardwise.probe.trial import Verdict, build_tried_model, trial_of, verdict_of_exception
from shardwise.runtime.adapter_facts import without_adapters
from shardwise.runtime.modes import has_dropout
from shardwise.tiny.random import fork_all_rng

logger = logging.getLogger("shardwise.plan")


def try_adapters(
    model: nn.Module, plan: Plan, facts: ModelFacts, *, num_parts: int, sequence_parallel: bool = False
) -> None:
    """Trains a tiny model with adapters like those of `model`, split by the base's plan, and compares every gradient.

    Caches success on disk. Logs if it cannot be tried. Communicates nothing.
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
