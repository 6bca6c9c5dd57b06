"""Training steps side by side: Shardwise, transformers' own tensor parallelism, and one process.

    python bench/tp.py                          both sizes, on 2 CPU ranks of its own (some minutes)
    python bench/tp.py --quick                  a tiny size, seconds: does everything still run?
    python bench/tp.py --rounds 40 --json out.json
    torchrun --nproc-per-node 4 bench/tp.py     the same on the ranks of a launcher

A step is forward, loss and backward of a llama in fp32 (with `--optimizer adamw`, its update too). Every round runs each contender
once, so ratios are taken between neighbours in time; the table shows their medians, and the quartiles. All contenders
load the same weights and must report the same loss. One process has as many threads as one rank has: one.

"On the wire" is what a rank sends in a step with ring collectives: 2 (n-1)/n of the bytes of an all-reduce, (n-1)/n of
those of an all-gather or reduce-scatter. The least a block-wise split can do is two all-reduces of the hidden states a
layer and direction, one for the embedding and one for the head: 4 layers + 2.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sidebyside.ranks import is_rank, main_that_stops, on_ranks, world_size
from sidebyside.report import describe_machine, mark, paired_ratio, shown_ratio, write_json
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

import shardwise
from shardwise.comm.count import CommunicationCount

OURS, OURS_SP, THEIRS, ONE = "shardwise", "shardwise, sequence parallel", "transformers", "one process"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A llama and its batch; `target` is the most that our step may take of transformers'."""

    name: str
    hidden: int
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 8192
    rows: int
    length: int
    target: float | None = None

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.length,
            use_cache=False,
            dtype="float32",
        )

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden states of a batch."""
        return self.rows * self.length * self.hidden * 4


SIZES = (
    Size(name="hidden 512, batch 2 x 256", hidden=512, rows=2, length=256, target=0.80),
    Size(name="hidden 256, batch 1 x 128", hidden=256, rows=1, length=128, target=0.65),
)
QUICK = (Size(name="hidden 64, batch 2 x 32", hidden=64, layers=2, vocabulary=512, rows=2, length=32),)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of one contender."""

    seconds: list[float]
    loss: float
    calls: int
    wire_bytes: float


def measure(size: Size, rounds: int, device: str, optimizer: str) -> dict[str, Seen]:
    """Runs on every rank. One process runs on rank 0 only, while the others wait."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tp_size = world_size()
    with shardwise.Mesh.open(f"tp{tp_size}", device=None if device == "cuda" else "cpu") as mesh:
        contenders = dict(_contenders(size, mesh, optimizer))
        ids = torch.randint(size.vocabulary, (size.rows, size.length), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids.to(mesh.device), "labels": ids.to(mesh.device)}
        losses = {name: contender.step(batch) for name, contender in contenders.items()}
        counts = {name: _count(contender, batch) for name, contender in contenders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds + 2):
            for name, contender in contenders.items():
                taken = _time(contender, batch, mesh.device)
                if number >= 2:  # the first rounds allocate
                    seconds[name].append(taken)
    return {
        name: Seen(
            seconds=seconds[name],
            loss=losses[name],
            calls=counts[name].num_calls(),
            wire_bytes=_wire_bytes(counts[name].bytes, tp_size),
        )
        for name in contenders
    }


@dataclass(frozen=True)
class Contender:
    """A model and its step, which returns the loss."""

    model: nn.Module
    forward_backward: Callable[[Mapping[str, Tensor]], Tensor]
    optimizer: torch.optim.Optimizer | None

    def step(self, batch: Mapping[str, Tensor]) -> float:
        loss = self.forward_backward(batch).detach()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        return float(loss)


def _contenders(size: Size, mesh: shardwise.Mesh, optimizer: str) -> Iterator[tuple[str, Contender]]:
    with _checkpoint(size, mesh) as directory:
        for name, sequence_parallel in ((OURS_SP, True), (OURS, False)):
            model = shardwise.load(directory, mesh, sequence_parallel=sequence_parallel).train()
            step = shardwise.TrainStep(model, mesh)
            yield name, Contender(model, lambda batch, step=step: step(batch).loss, _optimizer(model, optimizer))
        tp = DistributedConfig(tp_size=mesh.size("tp"))
        model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=tp).train()
        _check_really_split(model, mesh)
        yield THEIRS, Contender(model, _plain_step(model), _optimizer(model, optimizer))
        if mesh.rank == 0:
            whole = AutoModelForCausalLM.from_pretrained(directory).to(mesh.device).train()
            yield ONE, Contender(whole, _plain_step(whole), _optimizer(whole, optimizer))


@contextlib.contextmanager
def _checkpoint(size: Size, mesh: shardwise.Mesh) -> Iterator[str]:
    """A directory with the weights that every contender loads; made by rank 0, and gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") if mesh.rank == 0 else contextlib.nullcontext() as made:
        if made is not None:
            torch.manual_seed(0)
            LlamaForCausalLM(size.config).save_pretrained(made)
        told = [made]
        if mesh.size("tp") > 1:
            dist.broadcast_object_list(told)
        yield str(told[0])
        if mesh.size("tp") > 1:
            dist.barrier()


def _plain_step(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def step(batch: Mapping[str, Tensor]) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss

    return step


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    # torch's fastest form takes DTensors and plain tensors, but not in one group.
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, foreach=True)


def _check_really_split(model: nn.Module, mesh: shardwise.Mesh) -> None:
    """transformers has split its model: a rank holds little more than its share."""
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    share = held / sum(p.numel() for p in model.parameters())
    if share > 1.1 / mesh.size("tp"):
        raise SystemExit(
            f"transformers holds {share:.0%} of the model on a rank of {mesh.size('tp')}: nothing to compare"
        )


def _count(contender: Contender, batch: Mapping[str, Tensor]) -> CommunicationCount:
    with CommunicationCount() as count:
        contender.forward_backward(batch)
    contender.model.zero_grad()
    return count


def _time(contender: Contender, batch: Mapping[str, Tensor], device: torch.device) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    contender.forward_backward(batch)
    if contender.optimizer is not None:
        contender.optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    contender.model.zero_grad()
    return taken


def _wire_bytes(nbytes: Mapping[str, int], ranks: int) -> float:
    """What a rank sends with ring collectives."""
    share = (ranks - 1) / ranks
    return sum((2 * share if name == "all_reduce" else share) * count for name, count in nbytes.items())


def judge(size: Size, per_rank: list[dict[str, Seen]]) -> dict[str, Any]:
    """The record of one size: ratios, counts and whether the losses agree. A step takes as long as its slowest rank."""
    seconds = {
        name: [max(times) for times in zip(*(rank[name].seconds for rank in per_rank if name in rank), strict=True)]
        for name in per_rank[0]
    }
    first = per_rank[0]
    for name, seen in first.items():
        if not math.isclose(seen.loss, first[ONE].loss, rel_tol=1e-5):
            raise SystemExit(
                f"{name} computes a loss of {seen.loss}, one process {first[ONE].loss}: nothing to compare"
            )
    ranks = len(per_rank)
    return {
        "size": asdict(size),
        "ranks": ranks,
        "rounds": len(seconds[OURS]),
        "loss": first[ONE].loss,
        "minimum": {
            "calls": 4 * size.layers + 2,
            "wire_bytes": _wire_bytes({"all_reduce": (4 * size.layers + 2) * size.hidden_bytes}, ranks),
        },
        "contenders": {
            name: {
                "to_transformers": paired_ratio(seconds[name], seconds[THEIRS]),
                "to_one_process": paired_ratio(seconds[name], seconds[ONE]),
                "calls": seen.calls,
                "wire_bytes": seen.wire_bytes,
            }
            for name, seen in first.items()
        },
    }


def show(record: Mapping[str, Any], console: Console) -> None:
    """The record as a table."""
    minimum, target = record["minimum"], record["size"]["target"]
    table = Table(
        title=f"{record['size']['name']}, tp{record['ranks']}, {record['rounds']} rounds", title_justify="left"
    )
    for heading in ("step time", "/ transformers", "/ one process", "collectives", "on the wire", "/ minimum"):
        table.add_column(heading, justify="left" if heading == "step time" else "right")
    for name, seen in record["contenders"].items():
        wire = seen["wire_bytes"]
        table.add_row(
            name,
            shown_ratio(seen["to_transformers"]),
            shown_ratio(seen["to_one_process"]),
            str(seen["calls"]),
            f"{wire / 2**20:.2f} MiB",
            f"{wire / minimum['wire_bytes']:.2f}",
        )
    table.add_row("minimum", "", "", str(minimum["calls"]), f"{minimum['wire_bytes'] / 2**20:.2f} MiB", "1.00")
    console.print(table)
    if target is not None:
        reached = record["contenders"][OURS]["to_transformers"]["median"]
        console.print(f"shardwise / transformers: {mark(reached, target)}\n")


def main() -> int:
    arguments = _parse()
    console = Console(quiet=is_rank() and os.environ["RANK"] != "0")
    devices = [arguments.device] if arguments.device != "all" else ["cpu", "cuda"]
    records = []
    for device in devices:
        if device == "cuda" and torch.cuda.device_count() < world_size():
            console.print(
                f"device mode skipped: {torch.cuda.device_count()} GPUs here, {world_size()} ranks need one each"
            )
            continue
        for size in QUICK if arguments.quick else SIZES:
            with console.status(f"{size.name} on {device}, {arguments.rounds} rounds"):
                seen = on_ranks(measure, size, arguments.rounds, device, arguments.optimizer, device=device)
            record = {"on": describe_machine(device), "optimizer": arguments.optimizer, **judge(size, seen)}
            show(record, console)
            records.append(record)
    if not console.quiet:
        write_json(arguments.json, {"bench": "tp", "records": records})
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="how often each contender runs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one tiny size; its ratios mean nothing")
    parser.add_argument("--optimizer", choices=("none", "adamw"), default="none", help="what a step ends with")
    parser.add_argument(
        "--device", choices=("all", "cpu", "cuda"), default="all", help="default: CPU, then GPUs where there are enough"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles need neighbours")
    return arguments


if __name__ == "__main__":
    main_that_stops(main)
