"""Rules found on a twin, for the layers of the model."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.plan.spec import Plan
from shardwise.split.generalize import generalize

pytestmark = pytest.mark.single


class Sharing(nn.Module):
    """Layers that share a list of adapters, of which each uses its own."""

    def __init__(self, depth):
        super().__init__()
        adapters = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.layers = nn.ModuleList(nn.ModuleDict({"adapters": adapters}) for _ in range(depth))


FOUND = Plan.of({"layers.0.adapters.0": "colwise", "layers.1.adapters.1": "colwise"})


def test_layers_keep_the_rules_of_their_namesakes():
    assert generalize(FOUND, Sharing(2), Sharing(2)) == FOUND


def test_other_layers_get_those_of_the_first_of_their_kind():
    patterns = {rule.pattern for rule in generalize(FOUND, Sharing(2), Sharing(3)).rules}
    assert patterns == {"layers.0.adapters.0", "layers.1.adapters.1", "layers.2.adapters.0"}
