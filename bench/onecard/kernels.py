"""Parts of a model alone: the loss from the input of the head, attention by every kernel, and the rate of products."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onecard.measuring import measure_call
from onecard.setting import Setting
from shardwise.loss.cross_entropy import Head, head_cross_entropy
from shardwise.runtime.context import Axis

__all__ = ["ATTENTION", "LOSS", "MACHINE"]

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The mean loss of features `[rows, features]`, a head `[classes, features]` and targets `[rows]`."""


def measure_loss(setting: Setting, make: Callable[[], Call]) -> dict[str, Any]:
    """Forward and backward; memory over the inputs and their gradients, which everybody holds."""
    loss_of, shape, device = make(), setting.sizes.lora, setting.device
    dtype = torch.float32 if setting.quick else torch.bfloat16
    num_rows = shape.rows * shape.length
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(num_rows, shape.hidden, dtype=dtype, device=device, generator=generator)
    weight = torch.randn(shape.vocabulary, shape.hidden, dtype=dtype, device=device, generator=generator)
    weight *= shape.hidden**-0.5
    target = torch.randint(shape.vocabulary, (num_rows,), device=device, generator=generator)
    inputs = [each.requires_grad_() for each in (hidden, weight)]
    found: list[Tensor] = []

    def call() -> None:
        for each in inputs:
            each.grad = None
        loss = loss_of(hidden, weight, target)
        loss.backward()
        found[:] = [loss.detach()]

    held = 2 * sum(each.numel() * each.element_size() for each in inputs)
    return measure_call(call, setting, held_bytes=held) | {"loss": float(_last(found, call))}


def _last(found: list[Tensor], call: Callable[[], None]) -> Tensor:
    call()
    return found[0]


def _torch_loss() -> Call:
    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight).float(), target)


def _torch_linear_loss() -> Call:
    function: Call | None = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise ModuleNotFoundError("torch has it since 2.13")
    return function


def _liger_loss() -> Call:
    kernels: Any = importlib.import_module("liger_kernel.transformers")
    function = kernels.LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, target: function(weight, hidden, target)


def _cut_loss() -> Call:
    function: Call = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return function


def _our_loss() -> Call:
    def loss_of(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return head_cross_entropy(hidden, Head(weight, None), target, axis=Axis("tp"), num_classes=weight.shape[0])

    return loss_of


def measure_attention(setting: Setting, make: Callable[[Setting], Callable[..., Tensor]]) -> dict[str, Any]:
    """Causal, grouped key/value heads, forward and backward; operations as of half of the scores."""
    attend, shape, device = make(setting), setting.sizes.lora, setting.device
    dtype = torch.float32 if setting.quick else torch.bfloat16
    size = shape.hidden // shape.heads

    def heads(number: int) -> Tensor:
        return torch.randn(shape.rows, number, shape.length, size, dtype=dtype, device=device, requires_grad=True)

    query, key, value = heads(shape.heads), heads(shape.key_value_heads), heads(shape.key_value_heads)

    def call() -> None:
        output = attend(query, key, value)
        output.backward(torch.ones_like(output))

    found = measure_call(call, setting)
    flops = 12 * shape.rows * shape.heads * size * shape.length**2 / 2
    return {"milliseconds": found["milliseconds"], "tflops": flops / found["milliseconds"] / 1e9}


def _by_kernel(*kernels: SDPBackend) -> Callable[[Setting], Callable[..., Tensor]]:
    def make(setting: Setting) -> Callable[..., Tensor]:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(list(kernels)):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        return attend

    return make


def _torchs_choice(setting: Setting) -> Callable[..., Tensor]:
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _flex(setting: Setting) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = setting.sizes.lora.length
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=setting.device)
    if setting.device == "cpu":
        raise ModuleNotFoundError("flex attention has no backward on CPUs")
    compiled = torch.compile(flex_attention, backend=setting.backend)
    return lambda query, key, value: compiled(query, key, value, block_mask=mask, enable_gqa=True)


def _flash_package(setting: Setting) -> Callable[..., Tensor]:
    package: Any = importlib.import_module("flash_attn")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        moved = (each.transpose(1, 2) for each in (query, key, value))
        return package.flash_attn_func(*moved, causal=True).transpose(1, 2)

    return attend


def measure_products(setting: Setting) -> dict[str, Any]:
    """The rate of a large square product, which is what a step could be if it were one."""
    size = 64 if setting.quick else 8192
    dtype = torch.float32 if setting.quick else torch.bfloat16
    left, right = (torch.randn(size, size, dtype=dtype, device=setting.device) for _ in range(2))
    found = measure_call(lambda: left @ right, setting)
    rate = 2 * size**3 / found["milliseconds"] / 1e9
    return {"milliseconds": found["milliseconds"], "tflops": rate}


LOSS: dict[str, Callable[[], Call]] = {
    "torch, logits": _torch_loss,
    "torch, linear_cross_entropy": _torch_linear_loss,
    "Liger": _liger_loss,
    "cut-cross-entropy": _cut_loss,
    "shardwise": _our_loss,
}
ATTENTION: dict[str, Callable[[Setting], Callable[..., Tensor]]] = {
    "torch's choice": _torchs_choice,
    "SDPA, flash": _by_kernel(SDPBackend.FLASH_ATTENTION),
    "SDPA, cuDNN": _by_kernel(SDPBackend.CUDNN_ATTENTION),
    "SDPA, efficient": _by_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "flex attention": _flex,
    "flash_attn": _flash_package,
}
MACHINE: dict[str, Callable[[Setting], dict[str, Any]]] = {"products": measure_products}
