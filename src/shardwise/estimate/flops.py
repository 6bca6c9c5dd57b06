"""Floating-point operations: cost of a token in a model, and peak rates of devices."""

import math
import re
from collections.abc import Collection, Iterator, Mapping

from shardwise.estimate.cuts import experts_of
from shardwise.plan.decision import TokenWork
from shardwise.plan.structure import Heads, ModelFacts, parent_of, upwards

_PEAK_TFLOPS = (
    ("B300|B200", 2250.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100|H200|H800|GH200", 989.0),
    ("A100|A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
    ("MI300X|MI325X", 1307.0),
)
"""Dense bfloat16 with float32 sums, from the makers' data sheets, by patterns of the device's name; the first holds."""


def peak_flops(device_name: str) -> float | None:
    """Returns dense bfloat16 operations per second by the maker's data sheet; None for unlisted devices and CPUs."""
    return next((tflops * 1e12 for names, tflops in _PEAK_TFLOPS if re.search(rf"\b({names})\b", device_name)), None)


def count_work(facts: ModelFacts, trained: Collection[str], windows: Mapping[str, int]) -> TokenWork:
    """Counts what determines the FLOPs of a token, forward and backward, of a model; see [Note: model FLOPs].

    Args:
        trained: names of the trained parameters in the model.
        windows: sliding-window size in tokens of each attention that has one, by its name in `facts`.
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
    """Yields query and value features, and the window, of every innermost attention."""
    with_heads = [name for name, module in facts.modules.items() if module.heads is not None]
    around = {outer for name in with_heads for outer in upwards(parent_of(name))}
    for name in with_heads:
        if name in around:
            continue
        module = facts.modules[name]
        heads, attributes = module.heads, module.attributes
        assert heads is not None
        head_dim = heads.head_dim or attributes.get("key_value_proj_dim") or _hidden_size(facts) // heads.num_heads
        query = attributes.get("qk_head_dim") or head_dim
        value = attributes.get("v_head_dim", query)
        if _attends(facts, name, heads, query=query, value=value):
            yield heads.num_heads * (query + value), windows.get(name)


def _attends(facts: ModelFacts, name: str, heads: Heads, *, query: int, value: int) -> bool:
    """Whether the matrices of a module with heads have the sizes of an attention; those of state-space mixers differ.

    `query` and `value` are features per head.
    """
    matrices = []
    for fqn, module, _, shape in facts.parameters():
        kind = facts.modules[module].kind
        if len(shape) < 2 or not fqn.startswith(f"{name}."):
            continue
        if kind == "linear":
            matrices.append((shape[0], shape[1]))
        elif kind == "transposed" or module == name:  # [in, out] or [in, heads, features of a head]
            matrices.append((math.prod(shape[1:]), shape[0]))
    queries, keys = heads.num_heads * query, heads.num_key_value_heads * query
    if any(out_features == queries + 2 * keys for out_features, _ in matrices):
        return True
    of_queries = [number for number, (out, _) in enumerate(matrices) if out in (queries, 2 * queries)]  # with a gate
    of_others = [
        number
        for number, (out_features, in_features) in enumerate(matrices)
        if out_features in (keys, 2 * keys) or in_features == heads.num_heads * value
    ]
    return any(first != second for first in of_queries for second in of_others)


def _hidden_size(facts: ModelFacts) -> int:
    """Returns the features of a row of the input embedding; 0 without one."""
    shape = next(iter(facts.modules[facts.embedding].parameters.values()), ()) if facts.embedding else ()
    return shape[-1] if shape else 0
