"""Why no plan passed: the error of a model that cannot be split, in words, what torch said as the detail."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwise.api.trial import Verdict
from shardwise.errors import PlanError

__all__ = ["refused"]

_MAX_SHOWN = 4
_MAX_DETAIL = 120
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SIZES = re.compile(r"size|shape|dimension|length|channels|elements", re.IGNORECASE)


def refused(name: str, verdicts: Sequence[Verdict], *, tp_size: int, sequence_parallel: bool) -> PlanError:
    """The error for the model called `name`, no plan for which passed.

    Args:
        verdicts: on all plans that were tried, in the order in which they were.
    """
    tried = f"no declared or derived plan computes what the whole model does; {len(verdicts)} were tried"
    if not sequence_parallel:
        reasons = dict.fromkeys(verdict.reason for verdict in verdicts if verdict.reason)
        return PlanError(
            f"{name} cannot be split over tp={tp_size}: {tried}",
            why="; ".join(reasons) or None,
            fix="use tp_size 1, or give rules of your own",
        )
    telling = [verdict for verdict in verdicts if verdict.reason and not verdict.lacks_stack]
    lines = dict.fromkeys(_in_words(verdict) for verdict in telling or verdicts)
    at = _NUMBER.sub("*", next((verdict.module for verdict in telling if verdict.module), ""))
    fix = "run without sequence parallelism (sequence_parallel=False)"
    if telling:
        example = f', such as plan={{"{at}": "whole_sequence"}} for a module that needs all of it' if "*" in at else ""
        fix += f", or give rules that say where the sequence is split{example}\n(styles: shardwise.plan.spec.STYLES)"
    return PlanError(
        f"{name} cannot be split along the sequence: {tried}",
        at=at or None,
        why="\n".join(list(lines)[:_MAX_SHOWN]),
        fix=fix,
    )


def _in_words(verdict: Verdict) -> str:
    detail = " ".join(verdict.reason.split())[:_MAX_DETAIL]
    module = _NUMBER.sub("*", verdict.module)
    if verdict.lacks_stack:
        return "none of its lists of layers holds blocks that are split, so there is nothing to split the sequence for"
    if not module:
        return f"it runs on parts of the sequence, but computes something else: positions are mixed unseen ({detail})"
    if _SIZES.search(detail):
        return f"{module} puts a part of the sequence together with what is as long as all of it, or no part ({detail})"
    return f"{module} does not run on a part of the sequence ({detail})"
