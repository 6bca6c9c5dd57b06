"""What a tiny model of an architecture shows of the use it makes of labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.loss.label_use import LabelUse, claims_to_shift
from shardwise.tiny.inputs import make_batch
from shardwise.tiny.models import build_tiny_model, shrink_config

__all__ = ["probe_label_use"]

_IGNORED = -100
_NOTICEABLE = 1e-4  # of the largest logit: rounding is a thousand times smaller, what is attended to is larger


def probe_label_use(model: nn.Module) -> LabelUse | None:
    """How a model that says it is a causal language model uses its labels; None for others, and where no tiny model of
    its architecture can tell.
    """
    if not isinstance(model, PreTrainedModel) or not claims_to_shift(model):
        return None
    try:
        tiny = build_tiny_model(shrink_config(model.config, without_dropout=True), type(model), seed=0).eval()
        batch = make_batch(tiny, batch_size=1, seed=0)
        with torch.no_grad():
            shifts = not _uses_first_label(tiny, batch)
            return LabelUse(shifts=shifts, sees_target=shifts and _sees_next_token(tiny, batch))
    except Exception:  # noqa: BLE001 - the model's own code, on inputs that it may not be made for: then nothing is known
        return None


def _uses_first_label(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the loss depends on the first label, where there is no other."""
    losses = []
    for label in (1, 2):
        labels = torch.full_like(batch["labels"], _IGNORED)
        labels[..., 0] = label
        losses.append(model(**batch | {"labels": labels}).loss)
    return bool(torch.isfinite(losses[0])) and not torch.equal(*losses)


def _sees_next_token(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether logits depend on tokens after their own."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    ids = inputs["input_ids"]
    middle = ids.shape[-1] // 2
    other = torch.cat([ids[..., :middle], ids[..., middle:].flip(-1)], dim=-1)
    before = model(**inputs).logits[:, :middle]
    after = model(**inputs | {"input_ids": other}).logits[:, :middle]
    return bool((after - before).abs().max() > _NOTICEABLE * before.abs().max())
