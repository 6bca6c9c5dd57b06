"""Digests of tensors."""

from __future__ import annotations

import pytest
import torch

from shardwise.parameters.replicas import tensor_digest

pytestmark = pytest.mark.single


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (128, 2048), (61, 4096)])
def test_a_digest_changes_with_every_element_and_its_place_and_not_with_strides(dtype, shape):
    value = torch.randint(-9, 9, shape).to(dtype)
    digest = int(tensor_digest(value))
    assert digest == int(tensor_digest(value.clone()))
    assert digest == int(tensor_digest(torch.stack([value, value], -1)[..., 0])), "not contiguous"
    assert digest == int(tensor_digest(torch.cat([value.new_zeros(1), value.view(-1)])[1:].view(shape))), "an offset"
    for place in (0, value.numel() // 2, value.numel() - 1) if value.numel() else ():
        other = value.clone()
        other.view(-1)[place] += 1
        assert int(tensor_digest(other)) != digest
    if value.ndim == 2:
        for other in (value.flip(0), value.flip(1), value.roll(1, 0), value[[1, 0, *range(2, len(value))]]):
            assert int(tensor_digest(other)) != digest
