"""How a causal language model uses its labels: found out once by a tiny model, and kept on disk."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.data.batch import split_rows
from shardwise.loss.label_use import LabelUse, claims_to_shift, may_shift
from shardwise.search.kept import keep, path_of, read_kept
from shardwise.tiny.inputs import make_batch
from shardwise.tiny.models import build_tiny_model, shrink_config

__all__ = ["find_label_use", "probe_label_use"]

_PROBE = 2
"""Raised with every change of what is found."""
_IGNORED = -100
_NOTICEABLE = 1e-4  # of the largest logit: rounding is a thousand times smaller, what is attended to is larger


def find_label_use(model: nn.Module) -> LabelUse | None:
    """As `probe_label_use`, or what an earlier call found for such a model. Communicates nothing."""
    if not may_shift(model):
        return None
    path = path_of(model, "labels", {"probe": _PROBE})
    if (kept := read_kept(path, _parse)) is not None:
        return kept[0]
    found = probe_label_use(model)
    keep(path, {} if found is None else asdict(found))
    return found


def _parse(value: Any) -> tuple[LabelUse | None]:
    """What `find_label_use` has kept; `{}` is nothing that could be told."""
    if not isinstance(value, dict) or set(value) not in (set(), {each.name for each in fields(LabelUse)}):
        raise ValueError(f"no use of labels: {value}")
    return (LabelUse(**{name: bool(each) for name, each in value.items()}) if value else None,)


def probe_label_use(model: nn.Module) -> LabelUse | None:
    """How a model uses its labels; None where its class leaves no question, and where no tiny model of its architecture
    can tell.
    """
    if not isinstance(model, PreTrainedModel) or not may_shift(model):
        return None
    try:
        tiny = build_tiny_model(shrink_config(model.config, without_dropout=True), type(model), seed=0).eval()
        batch = make_batch(tiny, seed=0)
        with torch.no_grad():
            shifts = not _uses_first_label(tiny, batch)
            if not claims_to_shift(model):  # it may see images as a whole
                return LabelUse(shifts=shifts, sees_target=False)
            sees_target = shifts and _sees_next_token(tiny, batch)
            return LabelUse(shifts=shifts, sees_target=sees_target, mixes_rows=_mixes_rows(tiny))
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
    return _differ(after, before)


def _mixes_rows(model: nn.Module) -> bool:
    """Whether the logits of half of a batch are others than in the batch."""
    full = {name: value for name, value in make_batch(model, batch_size=4, seed=0).items() if name != "labels"}
    with suppress(Exception):  # it takes no such batch
        return _differ(torch.cat([model(**part).logits for part in split_rows(full, 4, 2)]), model(**full).logits)
    return False


def _differ(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() > _NOTICEABLE * expected.abs().max())
