"""A data-parallel training step by each contender, timed and counted on the ranks of `bench/fsdp.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.estimate.memory import state_bytes
from shardwise.parameters.registry import registry_of
from sidebyside.steps import Contender, Size, seconds_of

__all__ = ["BY_HAND", "DDP", "OURS", "Held", "measure_data"]

OURS, BY_HAND, DDP = "shardwise", "FSDP2 by hand", "DDP"


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank saw of one contender.

    Attributes:
        held_bytes: of parameters, gradients and optimizer states after a step.
        expected_bytes: what `shardwise.estimate` says of them; None where it is not asked.
    """

    seconds: list[float]
    busy_seconds: list[float]
    loss: float
    calls: dict[str, int]
    comm_bytes: dict[str, int]
    held_bytes: int
    expected_bytes: int | None


def measure_data(size: Size, layout: str, rounds: int, device: str) -> dict[str, Held]:
    """Runs on every rank of `layout`; the contenders by hand run on all ranks as data-parallel ones."""
    with shardwise.Mesh.open(layout, device=device) as mesh:
        ids = torch.randint(size.vocabulary, (size.rows, size.length), generator=torch.Generator().manual_seed(0))
        batches = {
            name: _rows(ids, rank, count, mesh.device)
            for name, rank, count in (
                (OURS, mesh.data_rank, mesh.data_size),
                (BY_HAND, mesh.rank, mesh.shape.world_size),
                (DDP, mesh.rank, mesh.shape.world_size),
            )
        }
        contenders = dict(_contenders(size, mesh))
        losses = {name: _global_loss(contender, batches[name], name) for name, contender in contenders.items()}
        counts = {name: _count(contender, batches[name]) for name, contender in contenders.items()}
        held = {name: _held_bytes(contender, batches[name]) for name, contender in contenders.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(rounds + 2):
            for name, contender in contenders.items():
                taken = seconds_of(contender, batches[name], mesh.device)
                if number >= 2:  # the first rounds allocate
                    times[name].append(taken)
        entries = registry_of(contenders[OURS].model).entries.values()
        expected = state_bytes((entry.layout for entry in entries), mesh.coords).total
    return {
        name: Held(
            seconds=[seconds for seconds, _ in times[name]],
            busy_seconds=[busy_seconds for _, busy_seconds in times[name]],
            loss=losses[name],
            calls={kind: counts[name].num_calls(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")},
            comm_bytes=dict(counts[name].bytes),
            held_bytes=held[name],
            expected_bytes=expected if name == OURS else None,
        )
        for name in contenders
    }


def _rows(ids: Tensor, rank: int, count: int, device: torch.device) -> dict[str, Tensor]:
    mine = ids.chunk(count)[rank].to(device)
    return {"input_ids": mine, "labels": mine}


def _contenders(size: Size, mesh: shardwise.Mesh) -> Iterator[tuple[str, Contender]]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return LlamaForCausalLM(size.config).to(mesh.device).train()

    model = shardwise.parallelize(build(), mesh)
    step = shardwise.TrainStep(model, mesh)
    yield OURS, Contender(model, lambda batch: step(batch).loss, _adamw(model))
    model = _by_hand(build(), mesh)
    yield BY_HAND, Contender(model, _mean_step(model), _adamw(model))
    model = DistributedDataParallel(build(), gradient_as_bucket_view=True)
    yield DDP, Contender(model, _mean_step(model), _adamw(model))


def _by_hand(model: nn.Module, mesh: shardwise.Mesh) -> nn.Module:
    """FSDP2 as its tutorial has it, on the units that Shardwise takes."""
    world = dist.DeviceMesh(mesh.device.type, torch.arange(mesh.shape.world_size))
    blocks: Any = model.model.layers
    for unit in (model.model.embed_tokens, *blocks, model.lm_head):
        fully_shard(unit, mesh=world, reshard_after_forward=unit not in (blocks[-1], model.lm_head))
    model.model.embed_tokens.set_unshard_in_backward(False)
    return fully_shard(model, mesh=world, reshard_after_forward=False)


def _mean_step(model: nn.Module) -> Any:
    def step(batch: Mapping[str, Tensor]) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)


def _global_loss(contender: Contender, batch: Mapping[str, Tensor], name: str) -> float:
    loss = torch.tensor(contender.step(batch))
    if name != OURS:
        dist.all_reduce(loss)
        loss /= int(os.environ.get("WORLD_SIZE", dist.get_world_size()))
    return float(loss)


def _count(contender: Contender, batch: Mapping[str, Tensor]) -> CommunicationCount:
    with CommunicationCount() as count:
        contender.forward_backward(batch)
    contender.model.zero_grad()
    return count


def _held_bytes(contender: Contender, batch: Mapping[str, Tensor]) -> int:
    contender.forward_backward(batch)
    assert contender.optimizer is not None
    states = [value for state in contender.optimizer.state.values() for value in state.values()]
    parameters = list(contender.model.parameters())
    tensors = [*parameters, *(p.grad for p in parameters), *states]
    contender_bytes = sum(_local(each).nbytes for each in tensors if isinstance(each, Tensor) and each.ndim)
    contender.model.zero_grad()
    return contender_bytes


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
