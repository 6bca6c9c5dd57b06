"""Images and positions go with the rows that they belong to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwise.data.batch import divide_media, split_rows

pytestmark = pytest.mark.single


class Model(nn.Module):
    config = SimpleNamespace(image_token_id=9)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_positions_of_three_sections_that_all_rows_share_are_not_cut(rows):
    batch = {"input_ids": torch.zeros(rows, 5, dtype=torch.long), "position_ids": torch.arange(15).view(3, 1, 5)}
    for part in split_rows(batch, rows, rows):
        assert torch.equal(part["position_ids"], batch["position_ids"])


def test_a_batch_without_images_may_hold_empty_tensors_of_them():
    batch = {
        "input_ids": torch.zeros(4, 5, dtype=torch.long),
        "pixel_values": torch.zeros(0, 7),
        "image_grid_thw": torch.zeros(0, 3, dtype=torch.long),
    }
    parts = split_rows(batch, 4, 2, divide_media(Model(), batch, 4, 2))
    assert [sorted(part) for part in parts] == [["input_ids"], ["input_ids"]]
