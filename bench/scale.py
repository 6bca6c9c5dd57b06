"""What a rank computes on its host for a large job: the plan, a save's division and index, a load's copies.

    python bench/scale.py                          1,024 ranks, a model of 1,000 tensors
    python bench/scale.py --layout fsdp1024 --layers 20 --json out.json

One process does what one rank of the job does, rank 0 where ranks differ; the model has no values. The seconds of all
ranks' reports are divided by the number of ranks. Seconds and memory above what the imports take are compared with the
most that is allowed for all parts together; the documents of a run, 10 million, have a limit of their own.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from sidebyside.report import describe_machine, mark, write_json

from shardwise.api.prepare import decide
from shardwise.checkpoint.manifest import INDEX, FileFacts, Manifest, read_index
from shardwise.checkpoint.stored import StoredParts
from shardwise.checkpoint.writer import RankReport, write_reported_index
from shardwise.data.ahead import PackedBatches
from shardwise.data.documents import Document, read_documents, write_documents
from shardwise.data.rows import DocumentRows
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.sharding.division import Division, assign_writers
from shardwise.topology.shape import MeshShape

MOST_SECONDS, MOST_BYTES, MOST_BYTES_OF_DATA = 10.0, 500e6, 1e9
TENSORS_PER_LAYER = 9


class Job:
    """A job of many ranks, of which this process is one; each part uses what the ones before have made."""

    def __init__(self, layout: str, num_layers: int, directory: Path) -> None:
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128_256}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
        config = transformers.LlamaConfig(**sizes, **heads, num_hidden_layers=num_layers)
        with torch.device("meta"):
            self.model = transformers.LlamaForCausalLM(config)
        self.shape, self.directory = MeshShape.parse(layout), directory
        self.plan: SplitPlan | None = None
        self.division: Division | None = None
        self.facts: FileFacts | None = None
        self.reports: list[RankReport] = []

    @property
    def layouts(self) -> dict[str, Any]:
        assert self.plan is not None
        return {name: each.layout for name, each in self.plan.parameters.items()}

    def decide_plan(self) -> str:
        """The plan of the split."""
        self.plan = decide(self.model, self.shape, ParallelSpec())
        return f"{len(self.plan.parameters):,} parameters"

    def divide_save(self) -> str:
        """Which rank writes what, and the boxes of the last rank."""
        self.division = assign_writers(self.layouts, self.shape)
        num_boxes = sum(len(self.division.boxes_of(name, self.shape.world_size - 1)) for name in self.layouts)
        return f"{num_boxes:,} parts of one rank"

    def report(self) -> str:
        """What every rank says that it has written; the ranks of a job do this at the same time."""
        assert self.division is not None
        self.reports = [self._report(self.division, rank) for rank in range(self.shape.world_size)]
        return f"{sum(len(pickle.dumps(each)) for each in self.reports) / 1e6:.0f} MB for rank 0"

    def write_index(self) -> str:
        """What rank 0 makes of the reports of all ranks."""
        values = {"tied": {}, "optimizers": {}, "values": {}}
        self.facts = write_reported_index(self.directory, self.reports, values)
        self.reports = []
        return f"{(self.directory / INDEX).stat().st_size / 1e6:.0f} MB"

    def _report(self, division: Division, rank: int) -> RankReport:
        parts = {}
        for name in self.layouts:
            if boxes := division.boxes_of(name, rank):
                parts[f"model/{name}"] = [f"{2**32 - 1},{json.dumps(box, separators=(',', ':'))}" for box in boxes]
        reported = {
            f"model/{name}": (torch.float32, layout)
            for name, layout in self.layouts.items()
            if division.first_writer(name) == rank
        }
        return RankReport({f"rank-{rank:05d}.safetensors": FileFacts(1, 1)}, parts, reported, {})

    def plan_load(self) -> str:
        """The index of a checkpoint, and what one rank copies from where, in another layout than the one that saved."""
        assert self.facts is not None
        files = {f"rank-{rank:05d}.safetensors": FileFacts(1, 1) for rank in range(self.shape.world_size)}
        about: dict[str, Any] = {"layout": str(self.shape), "model": "Llama", "time": 0.0, "versions": {}}
        numbers: dict[str, Any] = {"number": 1, "tag": "a", "step": 1, "content": "all"}
        manifest = Manifest(**about, **numbers, files={**files, INDEX: self.facts})
        stored = StoredParts(self.directory, manifest, read_index(self.directory, manifest))
        here = MeshShape.parse("fsdp64.tp2")
        plan = decide(self.model, here, ParallelSpec())
        coords = here.coords(here.world_size - 1)
        copies = (
            stored.find_copies(f"model/{name}", each.layout.pieces(coords)) for name, each in plan.parameters.items()
        )
        return f"{sum(map(len, copies)):,} copies"


def read_documents_of(directory: Path, number: int) -> str:
    """Writes as many documents of 2 to 29 tokens to one file, packs them into rows of 2,048, and reads a batch."""
    kinds = [Document(np.arange(size, dtype=np.uint32), np.ones(size, dtype=np.bool_)) for size in range(2, 30)]
    chosen = np.random.default_rng(0).integers(len(kinds), size=number, dtype=np.int8)
    path = directory / "documents"
    write_documents(path, (kinds[kind] for kind in chosen))
    rows = DocumentRows(read_documents(path), seq_length=2048, apart="positions")
    next(PackedBatches(rows, batch_size=8))
    return f"{rows.num_rows:,} rows"


def _most_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="fsdp128.tp8")
    parser.add_argument("--layers", type=int, default=111, help=f"each has {TENSORS_PER_LAYER} tensors")
    parser.add_argument("--documents", type=int, default=10**7, help="that are packed into rows")
    parser.add_argument("--json", help="file for the record")
    options = parser.parse_args()
    record: dict[str, Any] = {"layout": options.layout, "parts": {}, **describe_machine("cpu")}
    table = Table("", "seconds", "MB more at most", "", title=f"{options.layout}, {options.layers} layers")
    before = _most_bytes()
    with tempfile.TemporaryDirectory() as directory:
        job = Job(options.layout, options.layers, Path(directory))
        parts: dict[str, Callable[[], str]] = {
            "plan": job.decide_plan,
            "division of a save": job.divide_save,
            "reports of a save": job.report,
            "index of a save": job.write_index,
            "copies of a load": job.plan_load,
            "documents": lambda: read_documents_of(Path(directory), options.documents),
        }
        for name, work in parts.items():
            start = time.perf_counter()
            said = work()
            seconds = (time.perf_counter() - start) / (job.shape.world_size if name == "reports of a save" else 1)
            peak = _most_bytes() - before
            record["parts"][name] = {"seconds": seconds, "peak_bytes": peak}
            table.add_row(name, f"{seconds:.2f}", f"{peak / 1e6:.0f}", said)
    console = Console(soft_wrap=True)
    console.print(table)
    documents = record["parts"].pop("documents")["peak_bytes"]
    seconds = sum(each["seconds"] for each in record["parts"].values())
    peak = max(each["peak_bytes"] for each in record["parts"].values())
    console.print(f"{mark(seconds, MOST_SECONDS)} seconds, {mark(peak / 1e6, MOST_BYTES / 1e6)} MB; documents:")
    console.print(f"{mark(documents / 1e6, MOST_BYTES_OF_DATA / 1e6)} MB")
    record["parts"]["documents"] = {"peak_bytes": documents}
    write_json(options.json, record)
    return int(seconds > MOST_SECONDS or peak > MOST_BYTES or documents > MOST_BYTES_OF_DATA)


if __name__ == "__main__":
    raise SystemExit(main())
