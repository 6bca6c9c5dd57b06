"""Modes in which forwards run, and the ends of those that are entered by hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardwise.runtime.linear import check_index
from shardwise.runtime.modes import has_dropout, in_eval_mode, is_checkpointed, is_in_backward, leave_mode

pytestmark = pytest.mark.single


class Heard(TorchFunctionMode):
    """Keeps its name where an operation passes it."""

    def __init__(self, name, heard):
        super().__init__()
        self.name, self.heard = name, heard

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.heard.append(self.name)
        return func(*args, **(kwargs or {}))


def test_a_mode_ends_wherever_it_is_on_the_stack():
    heard = []
    modes = [Heard(name, heard) for name in "abc"]
    for mode in modes:
        mode.__enter__()
    leave_mode(modes[1])
    torch.ones(1)
    assert heard == ["c", "a"]
    leave_mode(modes[0])
    leave_mode(modes[2])
    torch.ones(1)
    assert heard == ["c", "a"]


def test_a_block_in_eval_mode_leaves_every_module_as_it_was():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(2, 2))).train()
    model[1].eval()
    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, False]


def test_dropout_is_told_by_modules_and_configs():
    assert has_dropout(nn.Sequential(nn.Dropout(0.1))) and not has_dropout(nn.Sequential(nn.Dropout(0.0)))
    model = nn.Linear(2, 2)
    model.attention_dropout = 0.2
    assert has_dropout(model)


def test_recomputation_and_backward_are_told():
    seen = []

    def run(x):
        seen.append((is_checkpointed(), is_in_backward()))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    run(x)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert seen == [(False, False), (True, False), (True, True)]


def test_an_index_that_is_outside_is_an_error_with_its_number():
    check_index(torch.tensor(True), "never", lambda: "unused")
    with pytest.raises(IndexError, match="7 of 5"):
        check_index(torch.tensor(False), "outside", lambda: "7 of 5")
