"""What is decided for a model, as one frozen value: how every parameter is stored, what every module does."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.plan.pipeline_plan import PipelinePlan
from shardwise.plan.regions import Region
from shardwise.plan.rule import ParameterRule
from shardwise.plan.sequence_plan import SequencePlan
from shardwise.plan.structure import Heads, LayerStack, Shape
from shardwise.plan.token_work import TokenWork
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Placement, Replicate, Split
from shardwise.topology.shape import MeshShape

__all__ = ["NormFormula", "ParameterPlan", "SplitPlan", "split_share"]


@dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """One parameter.

    Attributes:
        layout: how every axis of the mesh stores it; what tp does comes first.
        gradient: "full" where every rank computes the complete gradient of what it holds, "partial" where the ranks'
            gradients must be summed over tp (see [Note: partial inside]).
        data: "" where there are no data axes, "managed" where FSDP2 keeps the parameter as a `DTensor` over them,
            "reduced" where every data rank holds all of it and we sum its gradient.
        stages: the coordinates on pp that hold it, ascending; a tied parameter may have several.
    """

    fqn: str
    layout: Layout
    rule: ParameterRule
    gradient: str = "full"
    data: str = ""
    stages: tuple[int, ...] = (0,)

    @property
    def shape(self) -> Shape:
        """Of the full tensor."""
        return self.layout.shape

    @property
    def placement(self) -> Placement:
        """Over the tp axis."""
        return self.layout.placement("tp") or Replicate()


def split_share(planned: Iterable[ParameterPlan]) -> float:
    """Elements of split parameters over elements of all."""
    sizes = [(math.prod(parameter.shape), isinstance(parameter.placement, Split)) for parameter in planned]
    return sum(size for size, is_split in sizes if is_split) / max(1, sum(size for size, _ in sizes))


@dataclass(frozen=True, kw_only=True)
class NormFormula:
    """What a norm computes.

    Attributes:
        centered: whether it subtracts the mean.
        offset: added to the weight.
        gate: where its second input, through a SiLU, multiplies: "before" or "after" normalising, "none" without one.
    """

    centered: bool
    offset: float
    gate: str = "none"


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """A model's plan with nothing left to decide.

    Attributes:
        parameters: canonical FQN to its plan; tied aliases are left out.
        regions: in model order, outermost only.
        modules: FQN to the style of the modules whose forward changes.
        heads: attention module to its heads before and after the split.
        head: the output embedding if its logits are split over the vocabulary.
        sequence: where hidden states are split along the sequence; None without sequence parallelism.
        attributes: FQN of every attribute that counts what is split, to this rank's value.
        inputs: FQN of every input of which a rank uses its own part, to (dim, number of all heads).
        residual_inputs: FQNs of inputs that bypass their regions.
        local_sizes: FQNs of inputs from which their modules read the size of a rank's part of their features.
        fused_reductions: FQN of a module whose partial sum is deferred to another module, to that one's.
        added: FQNs of the parameters of which every rank adds its share to a partial sum.
        tied: alias FQN of every tied parameter to its canonical FQN.
        units: FQNs of the modules that data parallelism gathers together (see [Note: units]).
        norms: FQN of every norm over split features, to what it computes.
        pipeline: how the model is cut into stages; None without pp.
        weights: FQN of every module that computes with a weight of another module's, to the weight's: what adapters are
            around.
        work: what a token costs in the unsplit model.
    """

    shape: MeshShape
    parameters: Mapping[str, ParameterPlan]
    regions: tuple[Region, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, tuple[Heads, Heads]] = field(default_factory=dict)
    head: str | None = None
    sequence: SequencePlan | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    residual_inputs: frozenset[str] = frozenset()
    local_sizes: frozenset[str] = frozenset()
    fused_reductions: Mapping[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    embedding: str | None = None
    stacks: tuple[LayerStack, ...] = ()
    units: tuple[tuple[str, ...], ...] = ()
    norms: Mapping[str, NormFormula] = field(default_factory=dict)
    pipeline: PipelinePlan | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    work: TokenWork = field(default_factory=TokenWork)

    def names_held(self, coord: int) -> frozenset[str]:
        """The names, tied aliases by their own, under which the ranks at `coord` of pp hold parameters."""
        if self.pipeline is None:
            return frozenset((*self.parameters, *self.tied))
        return frozenset().union(*(self.names_of_stage(stage) for stage in self.pipeline.stages_on(coord)))

    def names_of_stage(self, stage: int) -> frozenset[str]:
        """Names of the parameters that a pipeline stage holds. A tied parameter has all names that the stage uses."""
        return frozenset(name for name, stages in self._stages_of_names.items() if stage in stages)

    def stages_holding(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter under this name of its; none where nothing does so."""
        return self._stages_of_names[name]

    @functools.cached_property
    def _stages_of_names(self) -> dict[str, tuple[int, ...]]:
        names = (*self.parameters, *self.tied)
        return {} if self.pipeline is None else self.pipeline.stages_of_names(names, self.tied)

    @property
    def tp_size(self) -> int:
        """Ranks along tp."""
        return self.shape.tp_size

    def stack_of(self, module: str) -> str | None:
        """The stack of layers of whose sequence `module` is given a part."""
        return self.sequence.stack_of(module) if self.sequence is not None else None
