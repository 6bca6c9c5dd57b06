"""Finds out by a tiny model how documents in packed or padded rows are kept apart."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardwise.data.rows import DocumentMasking, segment_inputs
from shardwise.errors import UnsupportedError
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config

_LENGTHS = (7, 5, 12)
"""Of the documents that share a row: beside the windows of tiny models they are short and long."""
_WIDTH = 26
_TOLERANCE = 1e-4
"""Of the largest logit: the same sums, in another order."""


def probe_document_masking(config: PreTrainedConfig, auto_class: Any, *, packed: bool) -> DocumentMasking:
    """The inputs that a model of `config` needs so that documents in a row give the same results as alone.

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
