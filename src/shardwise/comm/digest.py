"""Digest that compares tensors between ranks or over time."""

import functools

import torch
from torch import Tensor

_ROW = 4093  # a prime, and no size of a dim: rows that change places change the sums of columns


def tensor_digest(value: Tensor) -> Tensor:
    """Digest of the bytes of `value` in row-major order. Different bytes have different digests with near certainty.

    Args:
        value: plain tensor of any shape, dtype and device, not on the meta device.

    Returns:
        int64 scalar on the device of `value`. `value` is read once and not copied.
    """
    flat = value.detach().contiguous().view(-1)
    data = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element is contiguous with any stride
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    rows = words.numel() // _ROW
    sums = words[: rows * _ROW].view(rows, _ROW).sum(0, dtype=torch.int64)
    rest = torch.cat([words[rows * _ROW :], data[whole:].to(torch.int64)])
    weights = _weights(value.device)
    return (sums * weights[:_ROW]).sum() + (rest * weights[-rest.numel() or len(weights) :]).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Pseudorandom odd 64-bit integers, more than a row has words and bytes."""
    numbers = torch.arange(1, 2 * _ROW + 8, dtype=torch.int64) * 0x1E3779B97F4A7C15
    numbers = (numbers ^ (numbers >> 30)) * 0x3F58476D1CE4E5B9
    return ((numbers ^ (numbers >> 27)) | 1).to(device)
