"""Stages without a model's forward: blocks in a row, cut by hand, for what runs stages whatever they compute."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.parameters.registry import Registry
from shardwise.pipeline.runner import PipelineRunner
from shardwise.plan.pipeline_plan import LayerOrder, PipelinePlan
from shardwise.runtime.context import SplitContext
from shardwise.schedule.schedule import build_schedule
from shardwise.stages.model import Stages, StageTensor

WIDTH = 8


class Block(nn.Module):
    """A residual block with a weight that is used twice; of two tensors that travel, one is added in every stage."""

    def __init__(self, drops=0.0):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.dropout = nn.Dropout(drops)

    def forward(self, x, beside):
        return x + self.dropout(self.b(torch.tanh(self.a(x)) + self.a(x))) * beside.sigmoid()


class Blocks(nn.Module):
    """`num_stages` blocks; `beside` depends on the first and the third block's bias alone, as a position bias does."""

    def __init__(self, num_stages, drops=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(drops) for _ in range(num_stages))

    def stage(self, number, x, beside):
        if number == 0:
            beside = self.blocks[0].bias.expand(x.shape)
        if number == 2:
            beside = self.blocks[2].bias.expand(x.shape)
        return self.blocks[number](x, beside), beside

    def forward(self, x, target):
        beside = None
        for number in range(len(self.blocks)):
            x, beside = self.stage(number, x, beside)
        return (x - target).square().mean()


class StubStages(Stages):
    """The stages of `Blocks` that one rank holds."""

    def __init__(self, model, own, fails_at=None):
        self.model, self.own, self.fails_at, self.num_forwards = model, own, fails_at, 0
        self.last = len(model.blocks) - 1

    def shapes(self, stage, arguments):
        both = (StageTensor(shape=tuple(arguments["x"].shape), dtype=torch.float32, needs_gradient=True),) * 2
        return both if stage else (), both if stage != self.last else ()

    def run(self, stage, arguments, received):
        self.num_forwards += 1
        if self.fails_at is not None and self.num_forwards == self.fails_at:
            raise ZeroDivisionError("a stage that fails")
        x, beside = self.model.stage(stage, *(received or (arguments["x"], None)))
        return (x, beside) if stage != self.last else (x - arguments["target"]).square().mean()


def stub_runner(mesh, name, *, num_microbatches=8, num_stages_per_rank=None, fails_at=None, drops=0.0):
    """The model, with what this rank does not hold on meta, and what runs its stages."""
    schedule = build_schedule(
        name, pp_size=mesh.size("pp"), num_microbatches=num_microbatches, num_stages_per_rank=num_stages_per_rank
    )
    rank_of = tuple(schedule.rank_of.values())
    calls = tuple(f"blocks.{number}" for number in range(len(rank_of)))
    order = LayerOrder(calls=calls, uses={}, cut_tensors=())
    plan = PipelinePlan(order=order, schedule=name, starts=tuple(range(len(rank_of))), rank_of=rank_of)
    model = Blocks(len(rank_of), drops)
    own = plan.stages_on(mesh.coord("pp"))
    for number, block in enumerate(model.blocks):
        if number not in own:
            block.to("meta")
    context = SplitContext(device=mesh.device, has_dropout=drops > 0)
    registry = Registry(mesh=mesh, plan=None, context=context)
    return model, PipelineRunner(model, registry, plan, StubStages(model, own, fails_at))
