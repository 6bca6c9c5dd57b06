"""The decided plan of a model as one frozen value: storage of every parameter, role of every module."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.plan.pipeline_plan import PipelinePlan
from shardwise.plan.regions import Region, SequencePlan
from shardwise.plan.rule import ParameterRule
from shardwise.plan.spec import star_numbers
from shardwise.plan.structure import Heads, LayerStack, Shape
from shardwise.sharding.boxes import shape_of
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Placement, Replicate, Split
from shardwise.topology.shape import MeshShape


@dataclass(frozen=True, kw_only=True)
class TokenWork:
    """Number of weight and attention elements that one token is multiplied with, for model FLOPs.

    # [Note: model FLOPs]
    A trained weight costs 6 operations per token: a multiplication and an addition each for the forward, the gradient
    of its input, and its own gradient. A frozen weight costs 4. Attention of H query heads with Q features each, over T
    keys, costs 12 H Q T per layer: scores and weighted sums, forward and backward. So a token in a row of T tokens
    costs 6 N + 12 L H Q T in a model of L layers and N weights that multiply. These are matrices (of experts only those
    that a token uses) and the head, tied or not, but not the embedding lookup. Causal attention counts in full, as
    elsewhere (PaLM, appendix B); a sliding window counts the keys in it. Recomputation, padding and communication do
    not count, so that model FLOPs over the device's peak (MFU) compare different ways to train.

    Attributes:
        trained: elements of trained weights that multiply.
        frozen: elements of frozen weights that multiply.
        attention: features of all query and value heads, H (Q + V), of every attention, with its window or None.
    """

    trained: int = 0
    frozen: int = 0
    attention: tuple[tuple[int, int | None], ...] = ()

    def flops(self, seq_length: int) -> int:
        """Returns operations of forward and backward per token of a row of `seq_length` tokens: [Note: model FLOPs]."""
        seen = sum(features * min(seq_length, window or seq_length) for features, window in self.attention)
        return 6 * self.trained + 4 * self.frozen + 6 * seen


@dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """Plan of one parameter.

    Attributes:
        layout: storage over every axis of the mesh; tp comes first.
        gradient: "full" if every rank computes the complete gradient of its part, "partial" if the ranks' gradients
            must be summed over tp (see [Note: partial inside]).
        data: "" without data axes, "managed" if FSDP2 shards it as a `DTensor`, "reduced" if every data rank holds all
            of it and the gradient phase sums its gradient.
        stages: pp coordinates that hold it, ascending; a tied parameter may have several.
    """

    fqn: str
    layout: Layout
    rule: ParameterRule
    gradient: str = "full"
    data: str = ""
    stages: tuple[int, ...] = (0,)

    @property
    def shape(self) -> Shape:
        """Shape of the full tensor."""
        return self.layout.shape

    @property
    def placement(self) -> Placement:
        """Placement over the tp axis."""
        return self.layout.placement("tp") or Replicate()


def split_share(planned: Iterable[ParameterPlan]) -> float:
    """Returns the share of the elements that belong to split parameters."""
    sizes = [(math.prod(parameter.shape), isinstance(parameter.placement, Split)) for parameter in planned]
    return sum(size for size, is_split in sizes if is_split) / max(1, sum(size for size, _ in sizes))


@dataclass(frozen=True, kw_only=True)
class NormFormula:
    """Formula of a norm.

    Attributes:
        centered: whether it subtracts the mean.
        offset: added to the weight.
        gate: where the second input, through a SiLU, multiplies: "before" or "after" normalizing; "none" without one.
    """

    centered: bool
    offset: float
    gate: str = "none"


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How tp changes the forward of modules.

    Attributes:
        regions: in model order, outermost only.
        modules: FQN of every module whose forward changes, to its style.
        heads: FQN of every attention module, to its heads before and after the split.
        head: the output embedding if its logits are split over the vocabulary.
        attributes: FQN of every attribute that counts split features, to this rank's value.
        inputs: FQN of every input of which a rank uses its own part, to (dim, number of all heads).
        residual_inputs: FQNs of inputs that bypass their regions.
        local_sizes: FQNs of inputs from which their modules read the size of a rank's part of the features.
        fused_reductions: FQN of a module that leaves its partial sum to another module, to the other module's FQN.
        added: FQNs of parameters that are added to a partial sum, of which every rank adds its share.
        norms: FQN of every norm over split features, to its formula.
        weights: FQN of every module that computes with another module's weight, such as an adapter's wrapper, to the
            weight's FQN.
    """

    regions: tuple[Region, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, tuple[Heads, Heads]] = field(default_factory=dict)
    head: str | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    residual_inputs: frozenset[str] = frozenset()
    local_sizes: frozenset[str] = frozenset()
    fused_reductions: Mapping[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    norms: Mapping[str, NormFormula] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """How parameters are gathered along the data axes.

    Attributes:
        units: FQNs of the modules that form each FSDP unit (see [Note: units]).
    """

    units: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """A fully resolved plan of a model: its parameters, and one value for each way in which the model is split.

    Attributes:
        parameters: canonical FQN to its plan; tied aliases are left out.
        tied: alias FQN of every tied parameter, to its canonical FQN.
        stacks: the stacks of layers of the model.
        embedding: FQN of the input embedding; None if unknown.
        tensor: how tp changes the forward of modules.
        tokens: where hidden states are split along the sequence; None without sequence parallelism.
        data: how parameters are gathered along the data axes.
        pipeline: the stages; None with one pp rank.
        work: what one token costs.
    """

    shape: MeshShape
    parameters: Mapping[str, ParameterPlan]
    tied: Mapping[str, str] = field(default_factory=dict)
    stacks: tuple[LayerStack, ...] = ()
    embedding: str | None = None
    tensor: TensorPlan = field(default_factory=TensorPlan)
    tokens: SequencePlan | None = None
    data: DataPlan = field(default_factory=DataPlan)
    pipeline: PipelinePlan | None = None
    work: TokenWork = field(default_factory=TokenWork)

    def names_held(self, coord: int) -> frozenset[str]:
        """Returns the names, including tied aliases, under which the ranks at pp coordinate `coord` hold parameters."""
        if self.pipeline is None:
            return frozenset((*self.parameters, *self.tied))
        return frozenset().union(*(self.names_of_stage(stage) for stage in self.pipeline.stages_on(coord)))

    def names_of_stage(self, stage: int) -> frozenset[str]:
        """Returns the names of a pipeline stage's parameters; of a tied one, all names that the stage uses."""
        return frozenset(name for name, stages in self._stages_of_names.items() if stage in stages)

    def stages_holding(self, name: str) -> tuple[int, ...]:
        """Returns the stages that hold a parameter under this name; empty if none does."""
        return self._stages_of_names[name]

    @functools.cached_property
    def _stages_of_names(self) -> dict[str, tuple[int, ...]]:
        names = (*self.parameters, *self.tied)
        return {} if self.pipeline is None else self.pipeline.stages_of_names(names, self.tied)

    @property
    def num_parts(self) -> int:
        """Number of ranks among which heads and features are split."""
        return self.shape.tp_size

    def stack_of(self, module: str) -> str | None:
        """Returns the stack inside which `module` receives a part of the sequence; None if it receives all of it."""
        return self.tokens.stack_of(module) if self.tokens is not None else None


_HEADER = ("parameter", "x", "shape", "placement", "gradient", "style", "from")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A resolved plan in readable form; `str` is the table.

    Attributes:
        collectives: the counted communication of one microbatch, in words.
        memory: memory that a rank keeps between steps, in words; may be empty.
        stages: pipeline stages in words, one line per pp rank.
    """

    plan: SplitPlan
    collectives: tuple[str, ...] = ()
    memory: str = ""
    stages: tuple[str, ...] = ()

    def __str__(self) -> str:
        shape, parameters = self.plan.shape, self.plan.parameters.values()
        alike: dict[tuple[object, ...], list[ParameterPlan]] = {}
        for planned in parameters:
            key = (star_numbers(planned.fqn), planned.shape, planned.placement, planned.gradient, planned.rule.style)
            alike.setdefault(key, []).append(planned)
        lines = [f"plan for {shape}", "", *table([_HEADER, *map(_row, alike.values())], has_rule=True), ""]
        replicated = [same for same in alike.values() if isinstance(same[0].placement, Replicate)]
        if replicated and shape.tp_size > 1:
            lines += ["stay replicated:", *(f"  {_name(same)}: {same[0].rule.meaning}" for same in replicated), ""]
        if self.stages:
            lines += ["stages:", *(f"  {line}" for line in self.stages), ""]
        if self.collectives:
            lines += ["communicated:", *(f"  {line}" for line in self.collectives), ""]
        if shape.fsdp_size > 1:
            kept = "sharded over fsdp: parameters are gathered, and gradients reduce-scattered, block by block"
            lines += [kept, ""]
        total = sum(math.prod(each.shape) for each in parameters)
        pieces = (piece for each in parameters for piece in each.layout.pieces(shape.coords(0)))
        held = sum(math.prod(shape_of(piece.local)) for piece in pieces) / max(1, total)
        over = " over tp" if shape.data_size > 1 else ""
        who = "each rank" if shape.pp_size == 1 else "a rank of pp 0"
        split = f"{split_share(parameters):.1%} of all parameters are split{over}"
        return "\n".join([*lines, f"{split}; {who} holds {held:.1%} of the model", *filter(None, [self.memory])])


def _name(same: Sequence[ParameterPlan]) -> str:
    return star_numbers(same[0].fqn) if len(same) > 1 else same[0].fqn


def _row(same: Sequence[ParameterPlan]) -> tuple[str, ...]:
    first = same[0]
    gradient = "summed over tp" if first.gradient == "partial" else "full"
    rule = first.rule
    shape = str(list(first.shape))
    return _name(same), str(len(same)), shape, str(first.placement), gradient, rule.style, rule.source


def table(rows: Sequence[tuple[str, ...]], *, has_rule: bool) -> list[str]:
    """Formats rows as a table with aligned columns. The first row is the header, with a line below it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = [tuple("-" * width for width in widths)] if has_rule else []
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (rows[0], *rule, *rows[1:])]
