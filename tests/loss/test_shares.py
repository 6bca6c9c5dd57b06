"""Each of several targets counts by its own number, whatever its kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from shardwise.data.batch import count_targets, share_among, split_rows
from shardwise.errors import UnsupportedError
from shardwise.train.division import Division

pytestmark = pytest.mark.single


class Scored(nn.Module):
    """Compares words with `labels`, and every row with a number."""

    def __init__(self, measure):
        super().__init__()
        self.words, self.score, self.measure = nn.Linear(8, 5), nn.Linear(8, 1), measure

    def forward(self, hidden, labels, score_labels):
        words = F.cross_entropy(self.words(hidden).flatten(0, 1), labels.flatten())
        return words + self.measure(self.score(hidden[:, 0]).squeeze(-1), score_labels.view(-1).float())


@torch.no_grad()
@pytest.mark.parametrize("measure", [F.mse_loss, F.binary_cross_entropy_with_logits, F.l1_loss, F.huber_loss])
def test_numbers_beside_labels_count_by_rows(measure):
    torch.manual_seed(0)
    model = Scored(measure)
    batch = {"hidden": torch.randn(4, 6, 8), "labels": torch.randint(0, 5, (4, 6)), "score_labels": torch.rand(4, 1)}
    batch["labels"][1:3, 1:] = -100
    parts = split_rows(batch, 4, 4)
    counts = [count_targets(model, part) for part in parts]
    losses = [
        model(**part) * count / sum(counts) for part, count in zip(share_among(model, parts), counts, strict=True)
    ]
    assert float(sum(losses)) == pytest.approx(float(model(**batch)), abs=1e-6)


class Spoken(nn.Module):
    """Looks like one of transformers' heads of CTC."""

    loss_type = "ForCTC"

    def __init__(self, reduction):
        super().__init__()
        self.config = transformers.Wav2Vec2Config(ctc_loss_reduction=reduction)

    def forward(self, labels):
        raise NotImplementedError


def test_rows_of_ctc_count_alike_and_a_sum_of_them_is_not_divided():
    labels = torch.tensor([[1, 2, 3], [1, -100, -100]])
    assert count_targets(Spoken("mean"), {"labels": labels}) == 2
    Division(Spoken("mean"), 2, torch.device("cpu")).check({})
    Division(Spoken("sum"), 1, torch.device("cpu")).check({})
    with pytest.raises(UnsupportedError, match="in 2 parts, with a loss that is a sum over rows"):
        Division(Spoken("sum"), 2, torch.device("cpu")).check({})
