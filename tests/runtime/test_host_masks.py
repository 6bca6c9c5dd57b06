"""What the host says of a batch's masks is what transformers finds by looking at them on the device."""

import pytest
import torch

from shardwise.runtime.host_masks import cache_of, host_mask_of, leave_out_cache, read_host_mask, take_host_masks
from tests.families import tiny_model

pytestmark = pytest.mark.single

CPU, IDS = torch.device("cpu"), torch.arange(16).view(2, 8)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8])


@pytest.mark.parametrize(
    "given", [{}, {"attention_mask": PADDED}, {"position_ids": POSITIONS}, {"position_ids": POSITIONS[1:]}]
)
def test_a_forward_computes_as_without_it(given):
    model = tiny_model("llama", num_hidden_layers=1)
    model.set_attn_implementation("sdpa")
    expected = model(input_ids=IDS, use_cache=False, **given).logits
    assert take_host_masks(model)
    known = read_host_mask({"input_ids": IDS, **given}, CPU)
    found = model(input_ids=IDS, use_cache=False, **given | {"attention_mask": known.mask}).logits
    assert known.is_used and host_mask_of({"attention_mask": known.mask}) is known
    seen = given.get("attention_mask", torch.ones(2, 8)).bool()
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-5, atol=1e-5)


def test_documents_are_told_by_positions_that_begin_again():
    known = read_host_mask({"input_ids": IDS, "position_ids": POSITIONS}, CPU)
    assert known.is_full and known.segments.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]
    assert read_host_mask({"input_ids": IDS, "position_ids": POSITIONS[1:]}, CPU).segments is None
    padded = read_host_mask({"input_ids": IDS, "attention_mask": PADDED}, CPU)
    assert not padded.is_full and torch.equal(padded.mask, PADDED.bool())


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"input_ids": IDS[0]},
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 8, 8)},
        {"input_ids": IDS, "position_ids": POSITIONS[None].expand(3, -1, -1)},
        {"input_ids": IDS, "past_key_values": object()},
    ],
)
def test_of_other_batches_nothing_is_known(batch):
    assert read_host_mask(batch, CPU) is None and host_mask_of(batch) is None


def test_models_with_masks_or_attentions_of_their_own_are_left_alone():
    model = tiny_model("llama", num_hidden_layers=1)
    model.set_attn_implementation("eager")
    assert not take_host_masks(model) and not take_host_masks(torch.nn.Linear(2, 2))
    assert model.config._attn_implementation == "eager"


ONES = torch.ones(2, 3, dtype=torch.long)


def test_a_cache_is_found_by_either_name():
    cache = object()
    assert cache_of({"past_key_values": cache}) is cache and cache_of({"cache": cache}) is cache
    assert cache_of({"past_key_values": None}) is None and cache_of({}) is None


def test_a_caller_who_asks_for_a_cache_gets_one():
    arguments = {"input_ids": ONES, "use_cache": True}
    leave_out_cache(tiny_model("llama", num_hidden_layers=1), arguments)
    assert arguments["use_cache"] is True


def test_positions_without_a_mask_are_given_one_that_hides_nothing():
    model = tiny_model("llama", num_hidden_layers=1)
    positions = {"input_ids": ONES, "position_ids": torch.tensor([[0, 1, 0], [0, 1, 2]])}
    leave_out_cache(model, positions)
    assert torch.equal(positions["attention_mask"], torch.ones_like(ONES)) and positions["use_cache"] is False
    plain = {"input_ids": ONES}
    leave_out_cache(model, plain)
    assert plain == {"input_ids": ONES, "use_cache": False}
