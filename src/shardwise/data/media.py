"""Images, videos and sound of a batch: assigns them to the batch's rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import BatchError
from shardwise.runtime.adapter_facts import find_model

Runs = Mapping[str, list[slice]]
"""For each part of a batch the first dim's run of a tensor, by the tensor's name."""

_WORDS = {"video": ("video",), "image": ("image", "pixel"), "audio": ("audio", "feature")}


def is_medium(name: str) -> bool:
    """Whether an input of that name holds images, videos or sound, or describes each of them."""
    return _medium_of(name) is not None


def _medium_of(name: str) -> str | None:
    return next((medium for medium, words in _WORDS.items() if any(word in name for word in words)), None)


def divide_media(model: nn.Module, batch: Mapping[str, Any], num_rows: int, num_parts: int) -> Runs:
    """Divides the images, videos and sound of a batch like its rows, by the placeholders in `input_ids`.

    Args:
        batch: `input_ids` [rows, tokens]; tensors [images, …] such as `image_grid_thw`, or [patches of all images, …].
        num_rows: rows of the batch.
        num_parts: number of equal runs of rows.

    Returns:
        The runs of these tensors. Tensors without placeholders and with one item per row are not included.
    """
    if num_parts == 1:
        return {}
    names: dict[str, list[str]] = {}
    for name, value in batch.items():
        medium = _medium_of(name)
        if isinstance(value, Tensor) and value.ndim and medium is not None:
            names.setdefault(medium, []).append(name)
    runs: dict[str, list[slice]] = {}
    for medium, own in names.items():
        is_one_per_row = f"{medium}_grid_thw" not in own and all(batch[name].shape[0] == num_rows for name in own)
        try:
            runs |= _runs_of(model, batch, medium, own, num_parts)
        except BatchError:
            if not is_one_per_row:
                raise
    return runs


def _runs_of(
    model: nn.Module, batch: Mapping[str, Any], medium: str, names: list[str], num_parts: int
) -> dict[str, list[slice]]:
    grid, ids, token = batch.get(f"{medium}_grid_thw"), batch.get("input_ids"), _token_of(model, medium)
    why = "the model's config names no such token, or the batch has no input_ids"
    if isinstance(ids, Tensor) and token is not None:
        num_items = min(batch[name].shape[0] for name in names)
        sizes = torch.ones(num_items, dtype=torch.long) if grid is None else grid.prod(-1).cpu()
        ends, placeholders = sizes.cumsum(0), (ids == token).reshape(num_parts, -1).sum(1).cpu().cumsum(0)
        last = torch.searchsorted(ends * placeholders[-1], placeholders * sizes.sum())  # of each part
        ends = torch.cat((ends.new_zeros(1), ends))
        items = [int(end) + bool(placeholders[part]) for part, end in enumerate(last)]
        places = {num_items: items, int(sizes.sum()): [int(ends[item]) for item in items]}
        fits = all(
            int(ends[item]) * int(placeholders[-1]) == int(placeholders[part]) * int(sizes.sum())
            for part, item in enumerate(items)
        )
        if fits and all(batch[name].shape[0] in places for name in names):
            return {name: _slices(places[batch[name].shape[0]]) for name in names}
        why = f"{int(placeholders[-1])} tokens {token} in {len(ids)} rows do not fit {num_items} of them"
    raise BatchError(
        f"cannot divide the rows of {', '.join(names)} into {num_parts} microbatches",
        why=f"the {medium} tokens in input_ids tell which row they belong to: {why}",
        fix="use num_microbatches=1, or give every row as many",
    )


def _slices(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _token_of(model: nn.Module, medium: str) -> int | None:
    """Id of the placeholder token of a medium."""
    config = getattr(find_model(model), "config", None)
    found = (getattr(config, f"{medium}_token_{end}", None) for end in ("id", "index"))
    return next((token for token in found if isinstance(token, int)), None)
