"""Makes batches that a tiny twin's forward takes, with labels."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from shardwise.errors import UnsupportedError
from shardwise.proof.twin_fields import fields_of, sub_configs
from shardwise.proof.twin_rules import FAMILIES

__all__ = ["Padding", "make_batch"]

Padding = Literal["none", "left", "right"]

_IGNORED = -100
_PADDED_SHARE = 4  # every second sequence ends or begins with a quarter of padding


def make_batch(
    model: PreTrainedModel,
    *,
    batch_size: int = 2,
    sequence_length: int = 16,
    seed: int,
    padding: Padding = "none",
) -> dict[str, Tensor]:
    """Random inputs for `model`, with labels where its forward takes them.

    Args:
        model: its forward's arguments and its class decide what the batch holds.
        batch_size: sequences.
        sequence_length: tokens in each, of encoder and decoder alike.
        seed: of everything in the batch.
        padding: the side of every second sequence whose quarter is masked.

    Returns:
        input_ids, attention_mask and labels, [batch_size, sequence_length] unless the head says otherwise.

    Raises:
        UnsupportedError: the forward takes no input this function knows.
    """
    generator = torch.Generator().manual_seed(seed)
    takes = inspect.signature(model.forward).parameters
    shape = (batch_size, sequence_length)
    if "input_ids" not in takes:
        raise UnsupportedError(f"no batch for {type(model).__name__}", why=f"its forward takes {', '.join(takes)}")
    mask = _mask(shape, padding)
    family = FAMILIES.get(model.config.model_type)
    num_rows = getattr(model.config, family.id_rows) if family and family.id_rows else 1
    batch = {"input_ids": _tokens(model, (batch_size * num_rows, sequence_length), generator)}
    if "attention_mask" in takes:
        batch["attention_mask"] = mask
    if "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = _tokens(model, shape, generator)
    for name in family.inputs if family else ():
        batch[name] = _signal(model, name, batch_size, sequence_length, generator)
    return batch | _labels(model, batch["input_ids"], mask, generator)


def _signal(
    model: PreTrainedModel, name: str, batch_size: int, sequence_length: int, generator: torch.Generator
) -> Tensor:
    """Noise for images, [batch, channels, height, width], or audio features, [batch, mel bins, frames]."""
    fields: dict[str, Any] = {}
    for config in sub_configs(model.config):
        fields |= {key: value for key, value in fields_of(config).items() if value is not None}
    if name == "pixel_values":
        size = fields["image_size"]
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return torch.randn((batch_size, fields.get("num_channels", 3), height, width), generator=generator)
    frames = sequence_length * fields["audio_length_per_tok"]
    return torch.randn((batch_size, fields["num_mel_bins"], frames), generator=generator)


def _labels(model: PreTrainedModel, tokens: Tensor, mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    takes = inspect.signature(model.forward).parameters
    batch_size, sequence_length = mask.shape
    if "start_positions" in takes:
        return {
            name: torch.randint(1, sequence_length, (batch_size,), generator=generator)
            for name in ("start_positions", "end_positions")
        }
    if "labels" not in takes:
        return {}
    if _is_listed(model, "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"):
        return {"labels": torch.randint(0, model.config.num_labels, (batch_size,), generator=generator)}
    if _is_listed(model, "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"):
        labels = torch.randint(0, model.config.num_labels, tuple(mask.shape), generator=generator)
    elif "decoder_input_ids" in takes:
        labels = _tokens(model, (batch_size, sequence_length), generator)
    elif len(tokens) == len(mask):
        labels = tokens
    else:
        labels, mask = tokens.view(batch_size, -1, sequence_length).mT, mask[..., None]
    return {"labels": labels.masked_fill(mask == 0, _IGNORED)}


def _is_listed(model: PreTrainedModel, table: str) -> bool:
    return type(model).__name__ in getattr(modeling_auto, table).values()


def _mask(shape: tuple[int, int], padding: Padding) -> Tensor:
    mask = torch.ones(shape, dtype=torch.long)
    width = shape[1] // _PADDED_SHARE
    if padding != "none" and width:
        mask[1::2, slice(None, width) if padding == "left" else slice(-width, None)] = 0
    return mask


def _tokens(model: PreTrainedModel, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Random token ids without special ones: those stand for images, padding and ends."""
    sizes = [
        size for config in sub_configs(model.config) if isinstance(size := getattr(config, "vocab_size", None), int)
    ]
    special = {
        token
        for config in sub_configs(model.config)
        for name, value in vars(config).items()
        if name.endswith(("token_id", "token_index", "token_ids"))
        for token in (value if isinstance(value, list | tuple) else (value,))
    }
    allowed = torch.tensor([token for token in range(min(sizes)) if token not in special])
    return allowed[torch.randint(0, len(allowed), shape, generator=generator)]
