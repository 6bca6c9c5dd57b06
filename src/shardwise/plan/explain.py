"""The plan as a table: what happens to each kind of parameter, what is replicated and why, the share of bytes split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.plan.decision import ParameterPlan, SplitPlan
from shardwise.plan.match import star_numbers
from shardwise.sharding.boxes import shape_of
from shardwise.topology.shape import MeshShape

__all__ = ["Explanation", "Row", "explain", "table"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Parameters that differ only in their layer number.

    Attributes:
        name: their FQN with `*` for the number.
        num_elements: of all of their full tensors together.
        local_elements: of all of them together, on rank 0.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    placement: str
    gradient: str
    style: str
    source: str
    reason: str
    num_elements: int
    local_elements: int

    @property
    def is_split(self) -> bool:
        """Whether ranks hold parts of these parameters."""
        return self.placement != "replicate"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A resolved plan for people to read; `str` is the table.

    Attributes:
        collectives: what a microbatch's step communicates, as counted, in words.
        memory: what a rank keeps from step to step, in words; may be empty.
        stages: of a pipeline, in words, a line for each rank of pp.
    """

    layout: str
    rows: tuple[Row, ...]
    collectives: tuple[str, ...]
    memory: str = ""
    stages: tuple[str, ...] = ()

    @property
    def share_split(self) -> float:
        """Elements of split parameters over all elements."""
        total = sum(row.num_elements for row in self.rows)
        return sum(row.num_elements for row in self.rows if row.is_split) / max(1, total)

    @property
    def share_held(self) -> float:
        """Elements that rank 0 holds over all elements."""
        total = sum(row.num_elements for row in self.rows)
        return sum(row.local_elements for row in self.rows) / max(1, total)

    def __str__(self) -> str:
        header = ("parameter", "x", "shape", "placement", "gradient", "style", "from")
        body = [
            (row.name, str(row.count), str(list(row.shape)), row.placement, row.gradient, row.style, row.source)
            for row in self.rows
        ]
        lines = [f"plan for {self.layout}", "", *table([header, *body], has_rule=True), ""]
        replicated = [row for row in self.rows if not row.is_split]
        shape = MeshShape.parse(self.layout)
        if replicated and shape.tp_size > 1:
            lines += ["stay replicated:", *(f"  {row.name}: {row.reason}" for row in replicated), ""]
        if self.stages:
            lines += ["stages:", *(f"  {line}" for line in self.stages), ""]
        if self.collectives:
            lines += ["communicated:", *(f"  {line}" for line in self.collectives), ""]
        if shape.fsdp_size > 1:
            kept = "sharded over fsdp: parameters are gathered, and gradients reduce-scattered, block by block"
            lines += [kept, ""]
        over = " over tp" if shape.data_size > 1 else ""
        split = f"{self.share_split:.1%} of all parameters are split{over}; "
        who = "each rank" if shape.pp_size == 1 else "a rank of pp 0"
        lines.append(f"{split}{who} holds {self.share_held:.1%} of the model")
        if self.memory:
            lines.append(self.memory)
        return "\n".join(lines)


def explain(
    plan: SplitPlan, *, collectives: tuple[str, ...] = (), memory: str = "", stages: tuple[str, ...] = ()
) -> Explanation:
    """Explains `plan`, with what was counted and measured of it."""
    grouped: dict[tuple[object, ...], list[ParameterPlan]] = {}
    for planned in plan.parameters.values():
        key = (star_numbers(planned.fqn), planned.shape, planned.placement, planned.gradient, planned.rule.style)
        grouped.setdefault(key, []).append(planned)
    return Explanation(
        layout=str(plan.shape),
        rows=tuple(_row(same, plan.shape) for same in grouped.values()),
        collectives=collectives,
        memory=memory,
        stages=stages,
    )


def _row(same: list[ParameterPlan], shape: MeshShape) -> Row:
    first = same[0]
    size = math.prod(first.shape)
    local = sum(math.prod(shape_of(piece.local)) for each in same for piece in each.layout.pieces(shape.coords(0)))
    return Row(
        name=star_numbers(first.fqn) if len(same) > 1 else first.fqn,
        count=len(same),
        shape=first.shape,
        placement=str(first.placement),
        gradient="summed over tp" if first.gradient == "partial" else "full",
        style=first.rule.style,
        source=first.rule.source,
        reason=first.rule.meaning,
        num_elements=size * len(same),
        local_elements=local,
    )


def table(rows: Sequence[tuple[str, ...]], *, has_rule: bool) -> list[str]:
    """The lines of a table of aligned columns; a rule is drawn below the first row, its header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = [tuple("-" * width for width in widths)] if has_rule else []
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (rows[0], *rule, *rows[1:])]
