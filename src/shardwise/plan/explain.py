"""The plan as a table: split of each kind of parameter, replicated ones and why, share of bytes split."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.plan.decision import ParameterPlan, SplitPlan, split_share
from shardwise.plan.match import star_numbers
from shardwise.sharding.boxes import shape_of
from shardwise.sharding.placement import Replicate

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
