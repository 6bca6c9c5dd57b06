"""One architecture under one layout: built as a tiny model, run whole, then proved split over gloo ranks."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import peft
import torch
import transformers

from shardwise.api.verifying import Proof
from shardwise.errors import PlanError, ShardwiseError, UnsupportedError
from shardwise.estimate.cuts import fewest_microbatches
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.plan.options import ParallelSpec
from shardwise.probe.trial import trial_of
from shardwise.proof.parity import Report
from shardwise.ranks.spawn import spawn
from shardwise.runtime.modes import has_dropout
from shardwise.search.planning import plan_for
from shardwise.sharding.placement import Split
from shardwise.tiny.inputs import loss_or_surrogate
from shardwise.tiny.models import build_tiny_model, make_batch, set_runnable_mode, shrink_config
from shardwise.topology.shape import MeshShape
from sweep.checkpoints import reload_elsewhere
from sweep.every_cut import prove_every_cut
from sweep.known import architectures, default_config, model_class

__all__ = ["GROUPS", "Case", "Variant", "cases_of", "one_line", "prove"]

GROUPS = {
    "text": ("causal_lm", "masked_lm", "seq2seq_lm"),
    "vision": ("image_classification", "video_classification"),
    "audio": ("audio_classification", "ctc", "speech_seq2seq"),
}
"""Names that represent several tasks of `sweep.known.TASKS`."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How every case of a sweep is split and computed.

    Attributes:
        attention: the attention implementation; empty where the model chooses.
        adapters: the modules that LoRA adapts, as PEFT's target_modules; empty without adapters.
        every_cut: whether it is cut before every layer instead, all stages in one process.
        checkpoints: whether what this layout saves is loaded in others, instead of a proof.
    """

    layout: str = "tp2"
    sequence_parallel: bool = False
    attention: str = ""
    adapters: str = ""
    every_cut: bool = False
    checkpoints: bool = False

    def __str__(self) -> str:
        if self.every_cut:
            return "every cut"
        more = (*(("LoRA",) if self.adapters else ()), *(("checkpoints",) if self.checkpoints else ()))
        return " ".join((self.layout, *(("sp",) if self.sequence_parallel else ()), *self.attention.split(), *more))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One proof, and what tells it from every other: what is known of an equal case need not be found again."""

    model_type: str
    task: str
    class_name: str
    variant: Variant
    transformers_version: str = transformers.__version__

    def fields(self) -> dict[str, Any]:
        """The case as flat JSON values."""
        own = asdict(self)
        variant = own.pop("variant")
        return own | variant

    def is_row(self, row: dict[str, Any]) -> bool:
        """Whether a row of an earlier run is of this case."""
        known = {"adapters": "", "every_cut": False, "checkpoints": False} | row
        return all(known.get(name) == value for name, value in self.fields().items())


def cases_of(tasks: list[str], variant: Variant) -> list[Case]:
    """Every architecture that transformers lists for the tasks, or groups of them."""
    single = [task for name in tasks for task in GROUPS.get(name, (name,))]
    return [
        Case(model_type=model_type, task=task, class_name=name, variant=variant)
        for model_type, task, name in architectures(*single)
    ]


def prove(case: Case, *, timeout_seconds: float) -> dict[str, Any]:
    """The row of a case: its fields, the result and its cause, and what was measured.

    Results are "ok" and "wrong"; "refused" where the split is an error; "no tiny model" where none can be built or
    it does not run whole; "error" for anything else.
    """
    row = case.fields()
    start = time.perf_counter()
    if case.variant.every_cut:
        return row | _proved_every_cut(case, timeout_seconds) | {"seconds": round(time.perf_counter() - start, 2)}
    try:
        ((config, drops),) = spawn(_tiny_config, 1, case, timeout=timeout_seconds)
    except ShardwiseError as error:
        row |= {"result": "no tiny model", "cause": one_line(error)}
    except Exception as error:  # noqa: BLE001 - a model's own code fails in any way
        row |= {"result": "no tiny model", "cause": f"it does not run whole: {type(error).__name__}: {one_line(error)}"}
    else:
        run = _proved_adapters if case.variant.adapters else _reloaded if case.variant.checkpoints else _proved
        row |= run(case, config, timeout_seconds, drops=drops)
    return row | {"seconds": round(time.perf_counter() - start, 2)}


def _tiny_config(case: Case) -> tuple[Any, bool]:
    """The config of a tiny model that was seen to run unsplit, and whether the large one has dropout."""
    default = default_config(case.model_type, task=case.task)
    config = shrink_config(default, without_dropout=True)
    if case.variant.attention:
        config._attn_implementation = case.variant.attention
    tiny = build_tiny_model(config, model_class(case.class_name), seed=0)
    batch = make_batch(tiny, seed=0)
    set_runnable_mode(tiny, batch)
    loss_or_surrogate(tiny(**batch)).backward()
    return config, has_dropout(default)


def _proved(case: Case, config: Any, timeout_seconds: float, *, drops: bool) -> dict[str, Any]:
    variant = case.variant
    spec = ParallelSpec(sequence_parallel=variant.sequence_parallel)
    proof = Proof(
        config=config,
        model_class=model_class(case.class_name),
        layout=variant.layout,
        drops=drops,
        spec=spec,
        num_microbatches=fewest_microbatches(spec.pipeline, MeshShape.parse(variant.layout)),
    )
    try:
        report = proof.run(timeout_seconds=timeout_seconds)
    except (PlanError, UnsupportedError) as error:
        return {"result": "refused", "cause": one_line(error)}
    except Exception as error:  # noqa: BLE001 - one architecture's failure is a row, not the end
        return {"result": "error", "cause": f"{type(error).__name__}: {one_line(error)}"}
    found = report.measurements[0]
    return {
        "result": "ok" if report.passed else "wrong",
        "cause": "" if report.passed else _failures(report),
        "in_training": found.in_training is not None,
        "share": round(found.share_split, 4),
        "block_share": round(found.block_share, 4),
        "collectives_per_layer": found.collectives_per_layer and [round(n, 2) for n in found.collectives_per_layer],
        "whole": found.replicated,
        "split_seconds": round(found.split_seconds, 3),
    }


def _proved_every_cut(case: Case, timeout_seconds: float) -> dict[str, Any]:
    try:
        (found,) = spawn(prove_every_cut, 1, case.model_type, case.task, case.class_name, timeout=timeout_seconds)
    except UnsupportedError as error:
        return {"result": "no tiny model", "cause": one_line(error)}
    except PlanError as error:
        return {"result": "refused", "cause": one_line(error)}
    except Exception as error:  # noqa: BLE001 - one architecture's failure is a row, not the end
        return {"result": "error", "cause": f"{type(error).__name__}: {one_line(error)}"}
    return found


def _reloaded(case: Case, config: Any, timeout_seconds: float, *, drops: bool) -> dict[str, Any]:
    """As `_proved`, of checkpoints: saved in this layout after two steps of AdamW, loaded in others."""
    try:
        cause, number = reload_elsewhere(
            model_class(case.class_name), config, case.variant.layout, timeout=timeout_seconds
        )
    except (PlanError, UnsupportedError) as error:
        return {"result": "refused", "cause": one_line(error)}
    except Exception as error:  # noqa: BLE001 - one architecture's failure is a row, not the end
        return {"result": "error", "cause": f"{type(error).__name__}: {one_line(error)}"}
    return {"result": "wrong" if cause else "ok", "cause": cause, "compared": number}


def _proved_adapters(case: Case, config: Any, timeout_seconds: float, *, drops: bool) -> dict[str, Any]:
    """As `_proved`, of a tiny model with adapters of any values, on simulated ranks: one step, also with dropout."""
    start = time.perf_counter()
    try:
        ((result, cause, share),) = spawn(_try_adapters, 1, case, (config, drops), timeout=timeout_seconds)
    except (PlanError, UnsupportedError) as error:
        return {"result": "refused", "cause": one_line(error)}
    except Exception as error:  # noqa: BLE001 - one architecture's failure is a row, not the end
        return {"result": "error", "cause": f"{type(error).__name__}: {one_line(error)}"}
    seconds = round(time.perf_counter() - start, 3)
    return {"result": result, "cause": cause, "share": share, "block_share": share, "split_seconds": seconds}


def _try_adapters(case: Case, given: tuple[Any, bool]) -> tuple[str, str, float]:
    """Args: given: what `_tiny_config` returned. Returns the result, its cause, the share of parameters split."""
    config, drops = given
    spec = ParallelSpec(sequence_parallel=case.variant.sequence_parallel)
    shape = MeshShape.parse(case.variant.layout)
    lora = peft.LoraConfig(r=4, target_modules=case.variant.adapters, init_lora_weights=False)
    tiny = build_tiny_model(config, model_class(case.class_name), seed=0).eval()
    torch.manual_seed(0)
    try:
        tiny = peft.inject_adapter_in_model(lora, tiny).eval()
    except ValueError as error:
        return "refused", f"PEFT: {one_line(error)}", 0.0
    try:
        tiny(**make_batch(tiny, seed=0))
    except Exception as error:  # noqa: BLE001 - PEFT takes a subclass of nn.Linear for one, whatever it returns
        return "refused", f"PEFT's model does not run, unsplit: {type(error).__name__}: {one_line(error)}", 0.0
    facts = read_facts(tiny)
    plan = plan_for(tiny, spec, num_parts=shape.tp_size, facts=facts)
    decided = decide_split(plan, tiny, facts, shape, spec)
    trial = trial_of(tiny, num_parts=shape.tp_size, drops=drops)
    verdict = trial.run(plan, sequence_parallel=spec.sequence_parallel)
    own = [each for fqn, each in decided.parameters.items() if ".lora_" in fqn]
    share = sum(isinstance(each.placement, Split) for each in own) / max(1, len(own))
    return ("ok" if verdict.passed else "wrong"), verdict.reason, round(share, 4)


def _failures(report: Report) -> str:
    """What differs, by how much and where, of the rank that is off most."""
    found = []
    for name in ("loss", "logits", "gradient", "parameter", "in_training", "narrow"):
        each_rank = [getattr(each, name) for each in report.measurements]
        worst = None if each_rank[0] is None else max(each_rank, key=lambda each: each.error / each.allowed)
        if worst is not None and not worst.passed:
            found.append(f"{name} off by {worst.error:.1e}, {worst.allowed:.1e} allowed ({worst.name})")
    names = sorted({fqn for each in report.measurements for fqn in each.unequal_replicas})
    found += [f"replicas differ: {', '.join(names[:3])}"] * bool(names)
    return "; ".join(found)


def one_line(error: Exception) -> str:
    """An error's text as it fits a row."""
    return " ".join(str(error).split())[:600]
