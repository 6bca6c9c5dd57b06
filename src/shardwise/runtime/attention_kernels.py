"""torch's attention kernels, in the order in which they were measured to be fast on a card.

# [Note: kernels by measurement]
Which kernel is the fastest depends on the card, the dtype, the size of heads and whether there is a mask; torch's own
order knows little of that. `shardwise doctor` times forward and backward of each on the cards that it finds, and keeps
the order in a file next to the hub's cache, for the card's name and the version of torch. Runs read it and measure
nothing, so that two runs on a machine compute alike; where there is no file, torch's order holds. A kernel whose
numbers are wrong is left out. Which of them can do what a call asks for is torch's to say, at each call: the order is
set around it, in the recomputation of backward as well, and in what is compiled. What is switched off around the call
(`torch.backends.cuda.enable_flash_sdp(False)`, `sdpa_kernel`) stays off.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import constants
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["Orders", "chosen_kernels", "measure_kernels", "read_orders", "take_kernels"]

Orders = dict[str, list[str]]
"""Names of kernels, the fastest first, by dtype, size of heads, and "causal" or "mask"."""

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
_DTYPES = (torch.bfloat16, torch.float16)
_SIZES = (64, 128, 256)
_ROWS, _HEADS, _KEY_VALUE_HEADS, _LENGTH, _CHECKED_LENGTH = 2, 16, 4, 2048, 256
_NUM_TIMES = 10
_ALLOWED = 0.05  # of the largest entry, in dtypes of 8 and 11 bits

_taken: dict[tuple[torch.dtype, int, bool], list[str]] = {}
"""Of this process's card."""


def chosen_kernels(query: Tensor, *, has_mask: bool) -> list[SDPBackend] | None:
    """The order for an attention of `query` `[rows, heads, length, size]`; None where torch's holds."""
    if not _taken:
        return None
    size = next((each for each in _SIZES if query.shape[-1] <= each), 0)
    names = _taken.get((query.dtype, size, has_mask), ())
    return [_ALL[name] for name in names if _is_on(name)] or None


@torch.compiler.assume_constant_result  # as torch's own choice of a kernel is made when a graph is compiled
def _is_on(name: str) -> bool:
    """Whether torch may use a kernel here."""
    return _SWITCHES[name]()


def take_kernels(device: torch.device) -> Orders:
    """Has the attentions of this process use what was measured on `device`, and says what that is."""
    orders = read_orders(device)
    _taken.clear()
    for dtype in _DTYPES:
        for size in _SIZES:
            for has_mask in (False, True):
                if names := orders.get(_case(dtype, size, has_mask=has_mask)):
                    _taken[dtype, size, has_mask] = [*names, "math"]
    return orders


def read_orders(device: torch.device) -> Orders:
    """What was measured on cards as `device` is; nothing where that was not done, or the file is damaged."""
    if (place := _place(device)) is None:
        return {}
    try:
        orders: Orders = json.loads(place.read_text())
        is_known = all(set(names) <= _KERNELS.keys() for names in orders.values())
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return orders if is_known else {}


def measure_kernels(device: torch.device) -> Orders:
    """Times every kernel on a card, which should have nothing else to do, and keeps the orders for the runs to come."""
    orders = {
        _case(dtype, size, has_mask=has_mask): _measured(dtype, size, device, has_mask=has_mask)
        for dtype in _DTYPES
        for size in _SIZES
        for has_mask in (False, True)
    }
    place = _place(device)
    assert place is not None, "a card has a name"
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.{time.time_ns()}")
    partial.write_text(json.dumps(orders, indent=1))
    partial.replace(place)
    return orders


def _case(dtype: torch.dtype, size: int, *, has_mask: bool) -> str:
    return f"{str(dtype).removeprefix('torch.')} {size} {'mask' if has_mask else 'causal'}"


def _place(device: torch.device) -> Path | None:
    """Where the orders of a card are kept; None for devices that have no such kernels."""
    if device.type != "cuda":
        return None
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{_name_of(device)}-torch-{torch.__version__}")
    return Path(constants.HF_HOME) / "shardwise" / "attention" / f"{name}.json"


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def _measured(dtype: torch.dtype, size: int, device: torch.device, *, has_mask: bool) -> list[str]:
    """The kernels by their times: last those that cannot, and without those that are wrong."""
    seconds = {}
    expected = _computed(SDPBackend.MATH, _draw(torch.float32, size, device, _CHECKED_LENGTH), has_mask=has_mask)
    for name, kernel in _KERNELS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # why a kernel cannot
                found = _computed(kernel, _draw(dtype, size, device, _CHECKED_LENGTH), has_mask=has_mask)
            if all(map(_is_near, found, expected)):
                seconds[name] = _time(kernel, _draw(dtype, size, device, _LENGTH), has_mask=has_mask)
        except torch.OutOfMemoryError:  # which says nothing of the kernel
            raise
        except RuntimeError:  # torch has no such kernel for this
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


def _computed(kernel: SDPBackend, inputs: Sequence[Tensor], *, has_mask: bool) -> list[Tensor]:
    """The output of an attention by one kernel, and the gradients of its inputs."""
    query, key, value = inputs
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    if has_mask:  # as transformers calls it
        key, value = (each.repeat_interleave(_HEADS // _KEY_VALUE_HEADS, dim=1) for each in (key, value))
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
        options = {"attn_mask": mask.expand(_ROWS, 1, length, length)}
    with sdpa_kernel(kernel):
        output = F.scaled_dot_product_attention(query, key, value, **options)
    return [output.detach(), *torch.autograd.grad(output, inputs, torch.ones_like(output))]


def _time(kernel: SDPBackend, inputs: Sequence[Tensor], *, has_mask: bool) -> float:
    """The least seconds of a forward and backward."""
    found = []
    for _ in range(_NUM_TIMES):
        torch.cuda.synchronize(inputs[0].device)
        started = time.perf_counter()
        _computed(kernel, inputs, has_mask=has_mask)
        torch.cuda.synchronize(inputs[0].device)
        found.append(time.perf_counter() - started)
    return min(found)
