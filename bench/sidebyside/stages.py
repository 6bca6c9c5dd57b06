"""What `bench/pipeline.py` runs on its ranks: stages that sleep or multiply, and llama's stages by each contender."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaForCausalLM

import shardwise
from shardwise.parameters.registry import Registry
from shardwise.pipeline.runner import PipelineRunner
from shardwise.pipeline.stage import Microbatch
from shardwise.plan.options import Pipeline
from shardwise.plan.pipeline_plan import LayerOrder, PipelinePlan
from shardwise.runtime.context import SplitContext
from shardwise.schedule.schedule import build_schedule
from shardwise.schedule.timeline import chrome_trace, draw_svg, timeline
from shardwise.stages.model import Stages, StageTensor
from sidebyside.steps import Contender, Size, seconds_of

__all__ = ["BY_HAND", "OURS", "Bubble", "Step", "measure_bubbles", "measure_step"]

OURS, BY_HAND = "shardwise", "torch.distributed.pipelining by hand"

_WIDTH = 512
_REPEATS = 3


class _Slow(torch.autograd.Function):
    """Identity that takes a time forward and another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class _Sleeping(nn.Module):
    """A stage whose forward and whose two parts of the backward take a time each, and no processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = _Slow.apply(self.weight, 0.0, self.seconds)
        return _Slow.apply(x, self.seconds, self.seconds) * weight


class _Multiplying(nn.Sequential):
    """A stage that keeps a core busy."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers)))


class _Row(Stages):
    """Stages in a row, one tensor between them."""

    def __init__(self, own: tuple[int, ...], num_stages: int, build: Callable[[], nn.Module]) -> None:
        self.own, self.last = own, num_stages - 1
        self.modules = nn.ModuleDict({str(number): build() for number in own})

    def shapes(self, stage: int, arguments: Mapping[str, Any]) -> Any:
        cut_tensor = (StageTensor(shape=tuple(arguments["x"].shape), dtype=torch.float32, needs_gradient=True),)
        return cut_tensor if stage else (), cut_tensor if stage != self.last else ()

    def run(self, stage: int, arguments: Mapping[str, Any], received: Any) -> Any:
        x = self.modules[str(stage)](received[0] if received else arguments["x"])
        return (x,) if stage != self.last else x.square().mean()


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """The bubble of one schedule, measured and by the schedule, as shares of the time; and the most that a rank held at
    once, likewise.
    """

    schedule: str
    num_microbatches: int
    measured: float
    theory: float
    most_received: tuple[int, ...]
    in_flight: tuple[int, ...]
    svg: str
    trace: str


def measure_bubbles(
    names: Sequence[str], pp_size: int, counts: Sequence[int], sleep_seconds: float | None
) -> list[Bubble]:
    """Runs on every rank: steps of every schedule with every number of microbatches.

    Args:
        sleep_seconds: what a forward, and each part of a backward, sleeps; None: stages multiply matrices.
    """
    with shardwise.Mesh.open(f"pp{pp_size}", device="cpu") as mesh:
        return [_measure_bubble(mesh, name, count, sleep_seconds) for name in names for count in counts]


def _measure_bubble(mesh: shardwise.Mesh, name: str, num_microbatches: int, sleep_seconds: float | None) -> Bubble:
    """Of several steps, that with the median bubble counts."""
    pp_size = mesh.size("pp")
    schedule = build_schedule(name, pp_size=pp_size, num_microbatches=num_microbatches)
    rank_of = tuple(schedule.rank_of.values())
    order = LayerOrder(calls=tuple(map(str, range(len(rank_of)))), uses={}, cut_tensors=())
    plan = PipelinePlan(order=order, schedule=name, starts=tuple(range(len(rank_of))), rank_of=rank_of)
    layers = 24 // (len(rank_of) // pp_size)
    build = (lambda: _Multiplying(layers)) if sleep_seconds is None else (lambda: _Sleeping(sleep_seconds))
    stages = _Row(plan.stages_on(mesh.coord("pp")), len(rank_of), build)
    plain: Any = None  # these stages need no plan of a model
    registry = Registry(mesh=mesh, plan=plain, context=SplitContext(device=mesh.device))
    runner = PipelineRunner(stages.modules, registry, plan, stages)
    size = (2, 16, _WIDTH) if sleep_seconds is None else (1, 4)
    parts = [Microbatch({"x": torch.randn(size)}, lambda loss: loss) for _ in range(num_microbatches)]
    lines = []
    for _ in range(_REPEATS + 1):
        runner.times_next = True
        runner.run(parts, schedule)
        shown = runner.timeline()
        assert shown is not None
        lines.append(shown)
    found = sorted(lines[1:], key=lambda line: line.bubble)[_REPEATS // 2]
    held = schedule.in_flight
    lengths = defaultdict(list)
    for span in itertools.chain.from_iterable(found.spans):
        lengths[span.action.stage, span.action.kind].append(span.length)
    actions = itertools.chain.from_iterable(found.schedule.actions)
    computed = timeline(found.schedule, {each: statistics.fmean(lengths[each.stage, each.kind]) for each in actions})
    return Bubble(
        schedule=name,
        num_microbatches=num_microbatches,
        measured=found.bubble,
        theory=computed.bubble,
        most_received=(max(stage.most_received for _, stages in runner._kept.values() for stage in stages),),
        in_flight=held,
        svg=draw_svg(found),
        trace=chrome_trace({"step": found}),
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank saw of one contender."""

    seconds: list[float]
    busy_seconds: list[float]
    loss: float


class _Part(nn.Module):
    """Some of llama's layers, with what comes before the first or after the last."""

    def __init__(self, model: LlamaForCausalLM, layers: range) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(model.model.layers)
        self.embed = model.model.embed_tokens if self.is_first else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[number] for number in layers)
        self.norm, self.head = (model.model.norm, model.lm_head) if self.is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) if self.embed is not None else x
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def measure_step(size: Size, num_microbatches: int, rounds: int) -> dict[str, Step]:
    """Runs on two ranks: 1F1B steps by each contender in turn, on the same stages."""
    with shardwise.Mesh.open("pp2", device="cpu") as mesh:
        ids = torch.randint(size.vocabulary, (size.rows, size.length), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "labels": ids}
        half = size.layers // 2
        contenders = {
            OURS: _ours(size, mesh, num_microbatches, half),
            BY_HAND: _by_hand(size, mesh, num_microbatches, half),
        }
        losses = {name: contender.step(batch) for name, contender in contenders.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(rounds + 2):
            for name, contender in contenders.items():
                taken = seconds_of(contender, batch, mesh.device)
                if number >= 2:  # the first rounds allocate
                    times[name].append(taken)
    return {
        name: Step(
            seconds=[seconds for seconds, _ in times[name]],
            busy_seconds=[busy for _, busy in times[name]],
            loss=losses[name],
        )
        for name in contenders
    }


def _build(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(size.config).train()


def _ours(size: Size, mesh: shardwise.Mesh, num_microbatches: int, half: int) -> Contender:
    cut = Pipeline(layers=(half, size.layers - half))
    model = shardwise.parallelize(_build(size), mesh, pipeline=cut)
    step = shardwise.TrainStep(model, mesh, num_microbatches=num_microbatches)
    return Contender(model, lambda batch: step(batch).loss, _adamw(model))


def _by_hand(size: Size, mesh: shardwise.Mesh, num_microbatches: int, half: int) -> Contender:
    """torch's own stage and 1F1B, with metadata given and one message a cut."""
    model, rank = _build(size), mesh.coord("pp")
    part = _Part(model, range(half) if rank == 0 else range(half, size.layers))
    rows = size.rows // num_microbatches
    ids = torch.zeros(rows, size.length, dtype=torch.long)
    hidden = torch.zeros(rows, size.length, size.hidden, requires_grad=True)
    logits = torch.zeros(rows, size.length, size.vocabulary, requires_grad=True)
    stage = PipelineStage(
        part,
        rank,
        2,
        mesh.device,
        input_args=(ids if rank == 0 else hidden,),
        output_args=(hidden if rank == 0 else logits,),
        group=mesh.group("pp"),
    )
    loss_of = model.loss_function

    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits=logits, labels=labels, vocab_size=size.vocabulary) / num_microbatches

    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=weighted, scale_grads=False)

    def step(batch: Mapping[str, Tensor]) -> Tensor:
        if rank == 0:
            schedule.step(batch["input_ids"])
            return torch.zeros(())
        losses: list[Tensor] = []
        schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum()

    return Contender(part, step, _adamw(part))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
