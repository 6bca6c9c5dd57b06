"""What is seen of a model that runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.search.trace import watch

pytestmark = pytest.mark.single


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.proj(x)


class InTurn(nn.Module):
    """Attentions and MLPs in lists of their own, as XLM has them, and one layer that never runs."""

    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList(Layer() for _ in range(3))
        self.attentions = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for attention, mlp in zip(self.attentions, self.mlps, strict=False):
            x = mlp(attention(x))
        return x


def test_layers_are_seen_in_the_order_in_which_they_run():
    layers = watch(InTurn(), {"x": torch.randn(2, 4, requires_grad=True)})
    assert [layer.fqn for layer in layers] == ["attentions.0", "mlps.0", "attentions.1", "mlps.1"]
