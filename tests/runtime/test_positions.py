"""Training forwards build no cache, and rows with positions of their own stay one document."""

import pytest
import torch

from shardwise.runtime.host_masks import cache_of, leave_out_cache
from tests.families import tiny_model

pytestmark = pytest.mark.single

IDS = torch.ones(2, 3, dtype=torch.long)


def test_a_cache_is_found_by_either_name():
    cache = object()
    assert cache_of({"past_key_values": cache}) is cache and cache_of({"cache": cache}) is cache
    assert cache_of({"past_key_values": None}) is None and cache_of({}) is None


def test_a_caller_who_asks_for_a_cache_gets_one():
    arguments = {"input_ids": IDS, "use_cache": True}
    leave_out_cache(tiny_model("llama", num_hidden_layers=1), arguments)
    assert arguments["use_cache"] is True


def test_positions_without_a_mask_are_given_one_that_hides_nothing():
    model = tiny_model("llama", num_hidden_layers=1)
    positions = {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 0], [0, 1, 2]])}
    leave_out_cache(model, positions)
    assert torch.equal(positions["attention_mask"], torch.ones_like(IDS)) and positions["use_cache"] is False
    plain = {"input_ids": IDS}
    leave_out_cache(model, plain)
    assert plain == {"input_ids": IDS, "use_cache": False}
