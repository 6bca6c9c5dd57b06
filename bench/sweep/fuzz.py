"""One random configuration under one layout, proved on gloo ranks at the tolerances of `shardwise.verify`."""

from __future__ import annotations

import copy
import functools
import random
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

import shardwise
from shardwise.api import verifying
from shardwise.comm.collectives import all_gather_objects
from shardwise.errors import PlanError, ShardwiseError, UnsupportedError
from shardwise.estimate.cuts import fewest_microbatches
from shardwise.mesh import Mesh
from shardwise.plan.options import ParallelSpec
from shardwise.plan.spec import Plan
from shardwise.probe import trial
from shardwise.proof.parity import Measurement, Report
from shardwise.ranks.spawn import spawn
from shardwise.search import deriving, planning
from shardwise.tiny.models import build_tiny_model
from shardwise.topology.shape import MeshShape
from sweep.cases import GROUPS, one_line
from sweep.configs import random_config
from sweep.known import architectures, model_class

__all__ = ["FuzzCase", "draw_cases", "prove_random", "prove_together"]

WAYS = ("auto", "shrunk", "loaded")
"""How the split model comes about: as a user's would; with a plan derived on a tiny model of other sizes than its own;
read from a directory, with such a plan."""

_NOTED = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""What saving and loading note in a config."""


@dataclass(frozen=True, kw_only=True)
class FuzzCase:
    """One random configuration to be proved, and what tells it from every other."""

    model_type: str
    task: str
    class_name: str
    seed: int
    layout: str = "tp2"
    sequence_parallel: bool = False
    way: str = "auto"
    transformers_version: str = transformers.__version__


def draw_cases(
    number: int, *, layout: str, sequence_parallel: bool, seed: int, of: Collection[str] = ()
) -> list[FuzzCase]:
    """That many cases, of as many architectures as there are, or of these model types."""
    rng = random.Random(f"{seed} {layout} {sequence_parallel}")
    known = [each for each in architectures(*GROUPS["text"]) if not of or each[0] in of]
    drawn: list[tuple[str, str, str]] = []
    while len(drawn) < number:
        drawn += rng.sample(known, len(known))
    return [
        FuzzCase(
            model_type=model_type,
            task=task,
            class_name=name,
            seed=rng.randrange(10**6),
            layout=layout,
            sequence_parallel=sequence_parallel,
            way=rng.choice(WAYS),
        )
        for model_type, task, name in drawn[:number]
    ]


def prove_random(case: FuzzCase, *, timeout_seconds: float) -> dict[str, Any]:
    """The row of a case: its fields, the result and its cause.

    Results are "ok" and "wrong"; "refused" where an error of Shardwise's says what cannot be; "no tiny model" where the
    architecture has none that trains; "error" for anything else.
    """
    row, config = _drawn(case)
    return row if config is None else _proved(row, case, config, timeout_seconds)


def prove_together(cases: Sequence[FuzzCase], *, timeout_seconds: float) -> list[dict[str, Any]]:
    """Their rows, of cases of one layout on one set of ranks; where those fail, each on ranks of its own."""
    drawn = [(case, *_drawn(case)) for case in cases]
    todo = [(case, config) for case, _, config in drawn if config is not None]
    num_ranks = MeshShape.parse(cases[0].layout).world_size
    try:
        ranks = spawn(_prove_each_on_this_rank, num_ranks, todo, timeout=timeout_seconds)
    except Exception:  # noqa: BLE001 - each of them tells by itself whose it is
        return [row if config is None else _proved(row, case, config, timeout_seconds) for case, row, config in drawn]
    found = zip(*ranks, strict=True)
    return [row if config is None else row | _judged(case, next(found)) for case, row, config in drawn]


def _drawn(case: FuzzCase) -> tuple[dict[str, Any], PreTrainedConfig | None]:
    """The row of a case so far, and its config; the whole row and None where there is nothing to prove."""
    row: dict[str, Any] = asdict(case)
    try:
        config, row["changes"] = random_config(case.model_type, case.task, case.class_name, seed=case.seed)
    except ShardwiseError as error:
        return row | {"result": "no tiny model", "cause": one_line(error)}, None
    if not row["changes"]:
        row |= {"result": "no tiny model", "cause": "no change of its tiny model's configuration trains"}
        return row, None
    return row, config


def _proved(row: dict[str, Any], case: FuzzCase, config: PreTrainedConfig, timeout_seconds: float) -> dict[str, Any]:
    start = time.perf_counter()
    num_ranks = MeshShape.parse(case.layout).world_size
    try:
        found = spawn(_prove_on_this_rank, num_ranks, case, config, timeout=timeout_seconds)
    except (PlanError, UnsupportedError) as error:
        row |= _judged(case, [error])
    except Exception as error:  # noqa: BLE001 - one configuration's failure is a row, not the end
        row |= {"result": "error", "cause": f"{type(error).__name__}: {one_line(error)}"}
    else:
        row |= _judged(case, found)
    return row | {"seconds": round(time.perf_counter() - start, 2)}


def _judged(case: FuzzCase, found: Sequence[Measurement | ShardwiseError]) -> dict[str, Any]:
    """The result and its cause, of what every rank measured, or of an error of any rank's."""
    for each in found:
        if isinstance(each, ShardwiseError):
            return {"result": "refused", "cause": one_line(each)}
    measured = tuple(each for each in found if isinstance(each, Measurement))
    report = Report(subject=case.class_name, layout=case.layout, measurements=measured, seconds=0.0)
    return {
        "result": "ok" if report.passed else "wrong",
        "cause": "" if report.passed else str(report),
        "block_share": round(measured[0].block_share, 4),
    }


def _prove_each_on_this_rank(
    cases: Sequence[tuple[FuzzCase, PreTrainedConfig]],
) -> list[Measurement | PlanError | UnsupportedError]:
    """One after the other, each as if it were the only one: with the same seeds, and nothing patched before."""
    found: list[Measurement | PlanError | UnsupportedError] = []
    patched = [(trial, "_SMALL_ENOUGH"), (deriving, "has_dropout"), (planning, "search_plan")]
    before = [(where, name, getattr(where, name)) for where, name in [*patched, (verifying, "_splitter")]]
    for case, config in cases:
        random.seed(0)
        torch.manual_seed(0)
        try:
            found.append(_prove_on_this_rank(case, config))
        except (PlanError, UnsupportedError) as error:
            found.append(error)
        for where, name, value in before:
            setattr(where, name, value)
    return found


def _prove_on_this_rank(case: FuzzCase, config: PreTrainedConfig) -> Measurement:
    """Runs in a process of its own, or one that undoes what is patched here."""
    spec = ParallelSpec(plan="auto" if case.way == "auto" else "derived", sequence_parallel=case.sequence_parallel)
    proof = verifying.Proof(
        config=config,
        model_class=model_class(case.class_name),
        layout=case.layout,
        spec=spec,
        num_microbatches=fewest_microbatches(spec.pipeline, MeshShape.parse(case.layout)),
        num_steps=3,
    )
    if case.way != "auto":
        trial._SMALL_ENOUGH = 0
        _derive_once()
    if case.way == "loaded":
        verifying._splitter = lambda spec, dtype=None: functools.partial(_saved_and_loaded, spec=spec)
    return verifying._prove_on_this_rank(proof)


def _derive_once() -> None:
    """Has the models with and without dropout split alike, by the plan that the one with dropout gets."""
    derive, found = planning.search_plan, list[Plan]()

    def derive_first(*arguments: Any, **options: Any) -> Plan:
        return found[0] if found else found.append(derive(*arguments, **options)) or found[0]

    deriving.has_dropout = lambda model: True
    planning.search_plan = derive_first


def _saved_and_loaded(model: nn.Module, mesh: Mesh, *, spec: ParallelSpec) -> nn.Module:
    if model.training:  # what its modules drop is not all in its config, and some build no dropout where that has none
        return shardwise.parallelize(model, mesh, **vars(spec))
    with tempfile.TemporaryDirectory() as own:
        directory = all_gather_objects(_saved(model, own) if mesh.rank == 0 else None, mesh.group())[0]
        if directory is None:
            return shardwise.parallelize(model, mesh, **vars(spec))
        loaded = shardwise.load(directory, mesh, auto_class=type(model), dtype=model.dtype, **vars(spec))
        return loaded.train(model.training)


def _saved(model: Any, directory: str) -> str | None:
    """Where the model is saved, as it was before it ran; None where transformers does not read what it writes."""
    try:
        own = copy.deepcopy(model.config)  # saving notes the class in it, on this rank alone
        build_tiny_model(own, type(model), seed=0).to(model.dtype).save_pretrained(directory)
        read = type(model.config).from_pretrained(directory)
    except Exception:  # noqa: BLE001 - that is all there is to know
        return None
    kept = {name: value for name, value in model.config.to_dict().items() if name not in _NOTED}
    is_same = all(read.to_dict().get(name, value) == value for name, value in kept.items())
    return directory if is_same else None
