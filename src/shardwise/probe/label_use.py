"""Finds out by a tiny model how a model uses its labels, and caches the answer on disk."""

import copy
import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.data.batch import count_targets, find_uneven_targets, split_rows, target_names
from shardwise.data.rows import DocumentMasking, segment_inputs
from shardwise.errors import UnsupportedError
from shardwise.loss.label_use import LabelUse, claims_to_shift, may_shift, note_label_use, says_nothing
from shardwise.probe.disk_cache import cache_path, read, write
from shardwise.sharding.json_form import from_json, to_json
from shardwise.tiny.inputs import make_batch
from shardwise.tiny.models import build_tiny_model, shrink_config

_IGNORED = -100
_NOTICEABLE = 1e-4  # of the largest logit: rounding is a thousand times smaller, what is attended to is larger


def find_label_use(model: nn.Module) -> LabelUse | None:
    """Returns `probe_label_use(model)`, cached on disk. Communicates nothing."""
    if not may_shift(model):
        return None
    path = cache_path(model, "labels", {})
    if (cached := read(path, _parse)) is not None:
        return cached[0]
    use = probe_label_use(model)
    write(path, {"use": to_json(use)})
    return use


def _parse(value: Any) -> tuple[LabelUse | None]:
    return (None if value["use"] is None else from_json(LabelUse, value["use"]),)


def probe_label_use(model: nn.Module) -> LabelUse | None:
    """Returns how a model uses its labels; None if its class leaves no question, or no tiny model can tell."""
    if not isinstance(model, PreTrainedModel) or not may_shift(model):
        return None
    try:
        tiny = build_tiny_model(shrink_config(model.config, without_dropout=True), type(model), seed=0).eval()
        batch = make_batch(tiny, seed=0)
        with torch.no_grad():
            shifts = "labels" in batch and not _uses_first_label(tiny, batch)
            note_label_use(tiny, LabelUse(shifts=shifts, sees_target=False))
            divides = not says_nothing(model) or _adds_up(tiny)
            if not claims_to_shift(model):  # it may see images as a whole
                return LabelUse(shifts=shifts, sees_target=False, divides=divides)
            sees_target = shifts and _sees_next_token(tiny, batch)
            return LabelUse(shifts=shifts, sees_target=sees_target, divides=divides and not _mixes_rows(tiny))
    except Exception:  # noqa: BLE001 - the model's own code, on inputs that it may not be made for: then nothing is known
        return None


def _uses_first_label(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Returns whether the loss depends on the first label, if there is no other."""
    losses = []
    for label in (0, 1):
        labels = torch.full_like(batch["labels"], _IGNORED)
        labels[..., 0] = label
        losses.append(model(**batch | {"labels": labels}).loss)
    return bool(torch.isfinite(losses[0])) and not torch.equal(*losses)


def _sees_next_token(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Returns whether logits depend on later tokens."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    ids = inputs["input_ids"]
    middle = ids.shape[-1] // 2
    other = torch.cat([ids[..., :middle], ids[..., middle:].flip(-1)], dim=-1)
    before = model(**inputs).logits[:, :middle]
    after = model(**inputs | {"input_ids": other}).logits[:, :middle]
    return _differ(after, before)


def _mixes_rows(model: nn.Module) -> bool:
    """Returns whether the logits of half of a batch differ from those in the batch."""
    full = {name: value for name, value in make_batch(model, batch_size=4, seed=0).items() if name != "labels"}
    with suppress(Exception):  # it takes no such batch
        return _differ(torch.cat([model(**part).logits for part in split_rows(full, 4, 2)]), model(**full).logits)
    return False


def _adds_up(model: PreTrainedModel) -> bool:
    """Returns whether the loss of a batch is the mean of its halves' losses, weighted by their targets."""
    with suppress(Exception):  # it takes no such batch
        batch = _make_uneven(model)
        parts = split_rows(batch, 4, 2)
        if any(find_uneven_targets(model, part) for part in parts):
            return True  # of several kinds of targets, which a step refuses by the batch
        counts = [count_targets(model, part) for part in parts]
        losses = [float(model(**part).loss) for part in parts]
        found = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        return math.isclose(found, float(model(**batch).loss), rel_tol=_NOTICEABLE)
    return True


def _make_uneven(model: PreTrainedModel) -> dict[str, Tensor]:
    """Four rows, some padded, with targets on padding, targets of -100, and targets equal to the padding token."""
    batch = make_batch(model, batch_size=4, seed=0)
    if "attention_mask" in batch:
        batch["attention_mask"] = make_batch(model, batch_size=4, seed=0, padding="right")["attention_mask"]
    padding = getattr(model.config, "pad_token_id", None) or 0
    for name in target_names(model):
        target = batch.get(name)
        if not isinstance(target, Tensor) or target.is_floating_point():
            continue
        batch[name] = target = target.clone()
        if name.endswith("_positions"):
            target[0] = min(padding, int(target.max()))
        elif target.ndim == 1:
            target[1] = _IGNORED
        else:
            target[1, ..., :2] = min(padding, int(target.max()))
            target[0, ..., 3:] = target[2, ..., :2] = _IGNORED
    return batch


def _differ(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() > _NOTICEABLE * expected.abs().max())


_LENGTHS = (7, 5, 12)  # of the documents that share a row: beside the windows of tiny models they are short and long
_WIDTH = 26
_TOLERANCE = 1e-4  # of the largest logit: the same sums, in another order


def probe_document_masking(config: PreTrainedConfig, auto_class: Any, *, packed: bool) -> DocumentMasking:
    """Returns the inputs that a model of `config` needs so that documents in a row give the same results as alone.

    Args:
        packed: whether several documents share a row; else one document with padding.
    """
    model = build_tiny_model(shrink_config(copy.deepcopy(config)), auto_class, seed=0).eval()
    ids = make_batch(model, batch_size=1, sequence_length=_WIDTH, seed=0)["input_ids"]
    ways: tuple[DocumentMasking, ...] = ("positions", "mask") if packed else ("padded", "padded without mask")
    lengths = _LENGTHS if packed else _LENGTHS[:1]
    takes = inspect.signature(model.forward).parameters
    faults = []
    for way in ways:
        inputs = segment_inputs([lengths], _WIDTH, apart=way)
        if unknown := sorted(inputs.keys() - takes.keys()):
            faults.append(f"its forward takes no {' and no '.join(unknown)}")
            continue
        try:
            fault = _fault(model, ids, lengths, inputs)
        except Exception as error:  # noqa: BLE001 - a forward that is given what it does not serve fails in any way
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        if not fault:
            return way
        faults.append(f"with {' and '.join(inputs) or 'nothing'}, {fault}")
    what = "several documents in a row" if packed else "padded rows"
    raise UnsupportedError(
        f"a model of type {config.model_type!r} with {what}",
        why="tried on a tiny one, documents see each other or the padding:\n" + "\n".join(dict.fromkeys(faults)),
        fix="set data.rows=padded" if packed else "set data.rows=packed",
    )


def _fault(model: nn.Module, ids: Tensor, lengths: tuple[int, ...], inputs: Mapping[str, Tensor]) -> str:
    """Difference between the documents of one row and the same documents alone, in words; "" if there is none."""
    together = _logits(model, ids, inputs)
    start = 0
    for number, length in enumerate(lengths):
        alone = _logits(model, ids[:, start : start + length], {})
        difference = float((together[:, start : start + length] - alone).abs().max())
        if not difference <= _TOLERANCE * max(1.0, float(alone.abs().max())):
            return f"logits of document {number} differ by {difference:.1e}"
        start += length
    return ""


@torch.no_grad()
def _logits(model: nn.Module, ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    logits: Tensor = model(input_ids=ids, **inputs, **({"use_cache": False} if takes_cache else {})).logits
    return logits
