"""Floating-point operations: what a token costs in a model, read off its structure, and what a device does at best."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from shardwise.estimate.cuts import experts_of
from shardwise.plan.structure import ModelFacts, parent_of, upwards
from shardwise.plan.token_work import TokenWork

__all__ = ["count_work", "peak_flops"]

_PEAK_TFLOPS = (
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("GH200", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
    ("MI325X", 1307.0),
    ("MI300X", 1307.0),
)
"""Dense bfloat16 with float32 sums, from the makers' data sheets; the first name that a device's name contains."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second that the maker claims; None for devices that are not listed, and CPUs."""
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS if name in device_name), None)


def count_work(facts: ModelFacts, trained: Collection[str], windows: Mapping[str, int]) -> TokenWork:
    """What a token of a model with these facts costs; see [Note: model FLOPs].

    Args:
        trained: names of the parameters that are trained, as the model has them.
        windows: of the attentions that look no further back, by the names of facts: how many tokens they see.
    """
    bases = facts.adapters.bases if facts.adapters is not None else {}
    by_base = {bases.get(name, name) for name in trained}
    counts = {True: 0, False: 0}
    for fqn, module, _, shape in facts.parameters():
        if len(shape) > 1 and facts.modules[module].kind != "embedding":
            num_chosen, num_experts = experts_of(facts, module, shape)
            is_trained = facts.tied.get(fqn, fqn) in by_base
            counts[is_trained] += math.prod(shape) * num_chosen // num_experts
    for adapted in facts.adapters.adapted if facts.adapters is not None else ():
        for own in adapted.own:
            counts[own.fqn in trained] += math.prod(own.shape) if len(own.shape) > 1 else 0
    return TokenWork(trained=counts[True], frozen=counts[False], attention=tuple(_attentions(facts, windows)))


def _attentions(facts: ModelFacts, windows: Mapping[str, int]) -> Iterator[tuple[int, int | None]]:
    """Of every innermost module with heads: their query and value features, and its window."""
    known = [name for name, module in facts.modules.items() if module.heads is not None]
    around = {outer for name in known for outer in upwards(parent_of(name))}
    for name in (each for each in known if each not in around):
        heads, found = facts.modules[name].heads, facts.modules[name].attributes
        assert heads is not None
        query = found.get("qk_head_dim") or heads.head_dim or _hidden_size(facts) // heads.num_heads
        yield heads.num_heads * (query + found.get("v_head_dim", query)), windows.get(name)


def _hidden_size(facts: ModelFacts) -> int:
    """Features of a row of the input embedding; 0 where there is none."""
    shape = next(iter(facts.modules[facts.embedding].parameters.values()), ()) if facts.embedding else ()
    return shape[-1] if shape else 0
