"""A training step by each contender, timed and counted on the ranks of `bench/tp.py`."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, counters
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

import shardwise
from shardwise.comm.count import CommunicationCount
from sidebyside.ranks import SCRATCH

__all__ = [
    "ONE",
    "OURS",
    "OURS_COMPILED",
    "OURS_SP",
    "THEIRS",
    "THEIRS_COMPILED",
    "Contender",
    "Seen",
    "Size",
    "measure",
    "seconds_of",
]

OURS, OURS_SP, THEIRS, ONE = "shardwise", "shardwise sp", "transformers", "one process"
OURS_COMPILED, THEIRS_COMPILED = "shardwise compiled", "transformers compiled"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A llama and its batch; `target` is the most that our step may take of transformers'."""

    name: str
    hidden: int
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 8192
    mlp: float = 11008 / 4096  # LLaMA's own proportion of intermediate to hidden size
    rows: int
    length: int
    target: float | None = None

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=round(self.mlp * self.hidden),
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


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of one contender: of every round the time that passed, and that its processor worked; and what
    torch.compile did until then, in words.
    """

    seconds: list[float]
    busy_seconds: list[float]
    loss: float
    calls: int
    comm_bytes: dict[str, int]
    compiled: str


def measure(
    size: Size, tp_size: int, rounds: int, device: str, optimizer: str, backend: str | None = None
) -> dict[str, Seen]:
    """Runs on every rank. One process runs on rank 0, while the others wait.

    With a `backend` of torch.compile compiled contenders take part too.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with shardwise.Mesh.open(f"tp{tp_size}", device=device) as mesh:
        contenders = dict(_contenders(size, mesh, optimizer, backend))
        ids = torch.randint(size.vocabulary, (size.rows, size.length), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids.to(mesh.device), "labels": ids.to(mesh.device)}
        losses, compiled = {}, {}
        for name, contender in contenders.items():
            counters.clear()
            clear_compilation_metrics()
            losses[name] = contender.step(batch)
            for _ in range(2 if contender.is_compiled else 0):  # whether later steps compile again
                contender.step(batch)
            compiled[name] = _compiled() if contender.is_compiled else ""
        counts = {name: _count(contender, batch) for name, contender in contenders.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(rounds + 2):
            for name, contender in contenders.items():
                taken = seconds_of(contender, batch, mesh.device)
                if number >= 2:  # the first rounds allocate
                    times[name].append(taken)
    return {
        name: Seen(
            seconds=[seconds for seconds, _ in times[name]],
            busy_seconds=[busy_seconds for _, busy_seconds in times[name]],
            loss=losses[name],
            calls=counts[name].num_calls(),
            comm_bytes=dict(counts[name].bytes),
            compiled=compiled[name],
        )
        for name in contenders
    }


@dataclass(frozen=True)
class Contender:
    """A model and its step, which returns the loss."""

    model: nn.Module
    forward_backward: Callable[[Mapping[str, Tensor]], Tensor]
    optimizer: torch.optim.Optimizer | None
    is_compiled: bool = False

    def step(self, batch: Mapping[str, Tensor]) -> float:
        loss = self.forward_backward(batch).detach()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        return float(loss)


IDLE = Contender(nn.Module(), lambda batch: torch.zeros(()), None)


def _contenders(
    size: Size, mesh: shardwise.Mesh, optimizer: str, backend: str | None
) -> Iterator[tuple[str, Contender]]:
    with _checkpoint(size, mesh) as directory:
        if backend is not None:
            yield from _compiled_contenders(directory, mesh, optimizer, backend)
        for name, sequence_parallel in ((OURS_SP, True), (OURS, False)):
            model = shardwise.load(directory, mesh, sequence_parallel=sequence_parallel).train()
            step = shardwise.TrainStep(model, mesh)
            yield name, Contender(model, lambda batch, step=step: step(batch).loss, _optimizer(model, optimizer))
        tp = DistributedConfig(tp_size=mesh.size("tp"))
        model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=tp).train()
        _check_really_split(model, mesh)
        yield THEIRS, Contender(model, _plain_step(model), _optimizer(model, optimizer))
        # The other ranks take part in one process's turn by waiting for it.
        whole = AutoModelForCausalLM.from_pretrained(directory).to(mesh.device).train() if mesh.rank == 0 else None
        yield ONE, Contender(whole, _plain_step(whole), _optimizer(whole, optimizer)) if whole is not None else IDLE


def _compiled_contenders(
    directory: str, mesh: shardwise.Mesh, optimizer: str, backend: str
) -> Iterator[tuple[str, Contender]]:
    """Block by block, ours by its option and transformers' by hand."""
    model = shardwise.load(directory, mesh, compilation=shardwise.Compile(backend=backend)).train()
    step = shardwise.TrainStep(model, mesh)
    yield OURS_COMPILED, Contender(model, lambda batch: step(batch).loss, _optimizer(model, optimizer), True)
    tp = DistributedConfig(tp_size=mesh.size("tp"))
    theirs = AutoModelForCausalLM.from_pretrained(directory, distributed_config=tp).train()
    for block in theirs.model.layers:
        block.compile(backend=backend)
    yield THEIRS_COMPILED, Contender(theirs, _plain_step(theirs), _optimizer(theirs, optimizer), True)


@contextlib.contextmanager
def _checkpoint(size: Size, mesh: shardwise.Mesh) -> Iterator[str]:
    """A directory with the weights that every contender loads; made by rank 0, and gone afterwards."""
    scratch = os.environ.get(SCRATCH)
    making = tempfile.TemporaryDirectory(dir=scratch) if mesh.rank == 0 else contextlib.nullcontext()
    with making as made:
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
    """transformers has split its model: its layers at least, and in later versions the embeddings too."""
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    share = held / sum(p.numel() for p in model.parameters())
    if share > (1 + 1 / mesh.size("tp")) / 2:
        raise SystemExit(
            f"transformers holds {share:.0%} of the model on a rank of {mesh.size('tp')}: nothing to compare"
        )


def _compiled() -> str:
    breaks = sum(counters["graph_break"].values())
    return f"{counters['stats']['unique_graphs']} graph(s), {breaks} graph break(s)"


def _count(contender: Contender, batch: Mapping[str, Tensor]) -> CommunicationCount:
    with CommunicationCount() as count:
        contender.forward_backward(batch)
    contender.model.zero_grad()
    return count


def seconds_of(contender: Contender, batch: Mapping[str, Tensor], device: torch.device) -> tuple[float, float]:
    if dist.is_initialized():
        dist.barrier()
    start, busy_start = time.perf_counter(), time.process_time()
    contender.forward_backward(batch)
    if contender.optimizer is not None:
        contender.optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start, time.process_time() - busy_start
    contender.model.zero_grad()
    return taken
