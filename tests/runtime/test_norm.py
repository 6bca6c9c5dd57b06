"""Norms that may be split are recognised by what they compute."""

from __future__ import annotations

import pytest
from torch import nn

from shardwise.errors import UnsupportedError
from shardwise.runtime.norm import recognise_norm

pytestmark = pytest.mark.single


def test_norms_over_the_last_dim_are_recognised():
    assert recognise_norm(nn.LayerNorm(8)).centered
    assert not recognise_norm(nn.RMSNorm(8)).centered


def test_a_group_norm_is_none_of_them_though_it_computes_the_same_for_two_dims():
    with pytest.raises(UnsupportedError, match="GroupNorm"):
        recognise_norm(nn.GroupNorm(1, 8))
