"""torch's attention kernels, in the order in which they were measured to be fast on a card.

# [Note: kernels by measurement]
Which kernel is the fastest depends on the card, the dtype, the size of heads and whether there is a mask; torch's own
order knows little of that. `shardwise doctor` times forward and backward of each on the cards that it finds, and keeps
the order in a file next to the hub's cache, for the card's name and the version of torch. Runs read it and measure
nothing, so that two runs on a machine compute alike; where there is no file, torch's order holds. A kernel whose
numbers are wrong is left out. Which of them can do what a call asks for is torch's to say, at each call: the order is
set around it, in the recomputation of backward as well, and in what is compiled. What is switched off around the call
(`torch.backends.cuda.enable_flash_sdp(False)`, `sdpa_kernel`) stays off, and an order that is set around it holds.

Documents of packed rows are measured too: a mask, by the kernels in their order, beside `varlen_attn`, which is used
where it was right, forward and backward, and faster ([Note: bounds in place of a mask]).
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from shardwise.runtime.varlen import Bounds, attend_apart, find_bounds, mask_of

__all__ = [
    "Orders",
    "chosen_kernels",
    "drop_kernels",
    "is_faster_apart",
    "measure_kernels",
    "read_orders",
    "take_kernels",
]

Kernels = SDPBackend | list[SDPBackend] | None
"""One of torch's, several in an order, or `varlen_attn`."""

Orders = dict[str, list[str]]
"""Names of kernels, the fastest first, by dtype, size of heads, and what is asked for: see `_KINDS`. Of documents these
are "varlen" and "mask".
"""

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_ALL = {**_KERNELS, "math": SDPBackend.MATH}
_SWITCHES = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
_TORCHS_ORDER = torch._C._get_sdp_priority_order()
_KINDS = ("causal", "mask", "packed", "packed window")
"""Causal with grouped heads, a mask as transformers calls with it, and documents of packed rows, without and with a
window.
"""
_DTYPES = (torch.bfloat16, torch.float16)
_SIZES = (64, 128, 256)
_ROWS, _HEADS, _KEY_VALUE_HEADS, _LENGTH, _CHECKED_LENGTH = 2, 16, 4, 2048, 256
_DOCUMENTS = ((0.9, 0.1), (0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05))
"""The lengths of each row's documents, as shares of the row's."""
_NARROW = 5  # tokens: one more or less shows
_NUM_TIMES = 10
_ALLOWED = 0.05  # of the largest entry, in dtypes of 8 and 11 bits

_taken: dict[tuple[torch.dtype, int, str], list[str]] = {}
"""Of this process's card."""


def chosen_kernels(query: Tensor, *, has_mask: bool) -> list[SDPBackend] | None:
    """The order for an attention of `query` `[rows, heads, length, size]`; None where torch's holds."""
    if not _taken or not _follows_torch():
        return None
    size = next((each for each in _SIZES if query.shape[-1] <= each), 0)
    names = _taken.get((query.dtype, size, "mask" if has_mask else "causal"), ())
    return [_ALL[name] for name in names if _is_on(name)] or None


def is_faster_apart(dtype: torch.dtype, size: int, *, has_window: bool) -> bool:
    """Whether documents of packed rows, with heads of `size`, are to attend by `varlen_attn`: flash attention."""
    names = _taken.get((dtype, size, "packed window" if has_window else "packed"), ())
    return names[:1] == ["varlen"] and _follows_torch() and _is_on("flash")


@torch.compiler.assume_constant_result  # as torch's own choice of a kernel is made when a graph is compiled
def _is_on(name: str) -> bool:
    """Whether torch may use a kernel here."""
    return _SWITCHES[name]()


@torch.compiler.assume_constant_result  # as above
def _follows_torch() -> bool:
    """Whether nobody has set an order of kernels around this."""
    enabled = _cur_sdpa_kernel_backends(with_priority=True)
    return [int(each) for each in enabled] == [each for each in _TORCHS_ORDER if SDPBackend(each) in enabled]


def take_kernels(device: torch.device) -> Orders:
    """Has the attentions of this process use what was measured on `device`, and says what that is."""
    orders = read_orders(device)
    _taken.clear()
    for dtype in _DTYPES:
        for size in _SIZES:
            for kind in _KINDS:
                if names := orders.get(_case(dtype, size, kind)):
                    _taken[dtype, size, kind] = [*names, "math"]
    return orders


def drop_kernels() -> None:
    """Has them use torch's order again, and masks."""
    _taken.clear()


def read_orders(device: torch.device) -> Orders:
    """What was measured on cards as `device` is; nothing where that was not done, or the file is damaged."""
    if (place := _place(device)) is None:
        return {}
    try:
        orders: Orders = json.loads(place.read_text())
        is_known = all(set(names) <= {*_KERNELS, "varlen", "mask"} for names in orders.values())
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return orders if is_known else {}


def measure_kernels(device: torch.device) -> Orders:
    """Times every kernel on a card, which should have nothing else to do, and keeps the orders for the runs to come."""
    orders: Orders = {}
    for dtype in _DTYPES:
        for size in _SIZES:
            for kind in _KINDS:
                of_mask = [*orders.get(_case(dtype, size, "mask"), ()), "math"]
                orders[_case(dtype, size, kind)] = _measured(dtype, size, device, kind, of_mask)
    place = _place(device)
    assert place is not None, "a card has a name"
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{time.time_ns()}")
    partial.write_text(json.dumps(orders, indent=1))
    partial.replace(place)
    return orders


def _case(dtype: torch.dtype, size: int, kind: str) -> str:
    return f"{str(dtype).removeprefix('torch.')} {size} {kind}"


def _place(device: torch.device) -> Path | None:
    """Where the orders of a card are kept; None for devices that have no such kernels."""
    if device.type != "cuda":
        return None
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{_name_of(device)}-torch-{torch.__version__}")
    return Path(constants.HF_HOME) / "shardwise" / "attention" / f"{name}.json"


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def _measured(dtype: torch.dtype, size: int, device: torch.device, kind: str, of_mask: Sequence[str]) -> list[str]:
    """The contenders by their times: last those that cannot, and without those that are wrong."""
    contenders: Mapping[str, Kernels] = _KERNELS
    if kind.startswith("packed"):
        contenders = {"mask": [_ALL[name] for name in of_mask], "varlen": None}
    seconds = {}
    exact = _draw(torch.float32, size, device, _CHECKED_LENGTH)
    expected = _computed(SDPBackend.MATH, exact, _hidden(kind, _CHECKED_LENGTH, device))
    for name, kernels in contenders.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # why a kernel cannot
                hidden = _hidden(kind, _CHECKED_LENGTH, device)
                found = _computed(kernels, _draw(dtype, size, device, _CHECKED_LENGTH), hidden)
            if all(map(_is_near, found, expected)):
                hidden = _hidden(kind, _LENGTH, device)
                seconds[name] = _time(kernels, _draw(dtype, size, device, _LENGTH), hidden)
        except torch.OutOfMemoryError:  # which says nothing of the kernel
            raise
        except (RuntimeError, ValueError, TypeError):  # torch has no such kernel for this
            seconds[name] = float("inf")
    return sorted(seconds, key=seconds.__getitem__)


def _is_near(found: Tensor, expected: Tensor) -> bool:
    error = (found.float() - expected).abs().max()
    return bool(error <= _ALLOWED * expected.abs().max())


def _draw(dtype: torch.dtype, size: int, device: torch.device, length: int) -> list[Tensor]:
    """Query, key and value, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(0)
    heads = (_HEADS, _KEY_VALUE_HEADS, _KEY_VALUE_HEADS)
    drawn = (torch.randn(_ROWS, number, length, size, generator=generator) for number in heads)
    return [each.to(device, dtype).requires_grad_() for each in drawn]


def _hidden(kind: str, length: int, device: torch.device) -> tuple[Bounds, Tensor] | None:
    """The documents and their mask; None where all is seen that has been."""
    if kind == "causal":
        return None
    shares = _DOCUMENTS if kind.startswith("packed") else [(1.0,)] * _ROWS
    ends = [np.cumsum([round(length * share) for share in row])[:-1] for row in shares]
    bounds = find_bounds(np.stack([np.searchsorted(row, np.arange(length), side="right") for row in ends]))
    window = None if kind != "packed window" else _NARROW if length <= _CHECKED_LENGTH else length // 4
    bounds = bounds._replace(starts=bounds.starts.to(device), window=window)
    return bounds, mask_of(bounds, _ROWS, length)


def _computed(kernels: Kernels, inputs: Sequence[Tensor], hidden: tuple[Bounds, Tensor] | None) -> list[Tensor]:
    """The output of an attention, `[rows, heads, length, size]`, and the gradients of its inputs."""
    query, key, value = inputs
    if kernels is None:
        assert hidden is not None
        output = attend_apart(query, key, value, hidden[0]).transpose(1, 2)
    else:
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
        if hidden is not None:  # as transformers calls it
            key, value = (each.repeat_interleave(_HEADS // _KEY_VALUE_HEADS, dim=1) for each in (key, value))
            options = {"attn_mask": hidden[1]}
        with sdpa_kernel(kernels, set_priority=isinstance(kernels, list)):
            output = F.scaled_dot_product_attention(query, key, value, **options)
    return [output.detach(), *torch.autograd.grad(output, inputs, torch.ones_like(output))]


def _time(kernels: Kernels, inputs: Sequence[Tensor], hidden: tuple[Bounds, Tensor] | None) -> float:
    """The least seconds of a forward and backward."""
    found = []
    for _ in range(_NUM_TIMES):
        torch.cuda.synchronize(inputs[0].device)
        started = time.perf_counter()
        _computed(kernels, inputs, hidden)
        torch.cuda.synchronize(inputs[0].device)
        found.append(time.perf_counter() - started)
    return min(found)
