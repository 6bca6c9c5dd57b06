"""Adapts per-frequency rotary settings to the head size of a tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from shardwise.tiny.fields import read_field

__all__ = ["shrink_rotary"]

_DICTS = ("rope_parameters", "rope_scaling")
_SECTIONS = [16, 24, 24]
_POSITIONS = 32  # below the tiny model's maximum of 64, so that scaling beyond the original length stays visible


def shrink_rotary(original: PreTrainedConfig, tiny: PreTrainedConfig) -> dict[str, Any]:
    """The rotary attributes of `tiny` that its head size changes, given those of `original`."""
    old_dim, new_dim = _head_dim(original), _head_dim(tiny)
    values = vars(tiny)
    new: dict[str, Any] = {}
    if old_dim is None or new_dim is None:
        return new
    if isinstance(rotary_dim := values.get("rotary_dim"), int):
        new["rotary_dim"] = max(2, rotary_dim * new_dim // old_dim // 2 * 2)
    # Under latent attention the rotated part has a name of its own, and a factor, where there is one, repeats it.
    whole_dim = read_field(tiny, "head_dim") if read_field(tiny, "qk_rope_head_dim") else None
    factor = new_dim / whole_dim if whole_dim else None
    default = factor or values.get("partial_rotary_factor") or 1.0
    if values.get("partial_rotary_factor"):
        new["partial_rotary_factor"] = _even_factor(default, whole_dim or new_dim)
    for name in _DICTS:
        if isinstance(values.get(name), dict):
            new[name] = _shrink(values[name], whole_dim or new_dim, default, fixed=factor is not None)
    rope = new.get("rope_parameters") if _has_sections(tiny) else None
    for each in [value for value in rope.values() if isinstance(value, dict)] or [rope] if rope else ():
        if "mrope_section" not in each:
            rotated = (whole_dim or new_dim) * (each.get("partial_rotary_factor") or default)
            each["mrope_section"] = _apportion(_SECTIONS, int(rotated) // 2)
    return new


def _has_sections(config: PreTrainedConfig) -> bool:
    """Whether the model divides frequencies between time, height and width, with default sections."""
    return "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ())


def _head_dim(config: PreTrainedConfig) -> int | None:
    for name in ("qk_rope_head_dim", "head_dim", "attention_head_dim", "kv_channels", "d_kv"):
        if isinstance(found := read_field(config, name), int) and found > 0:
            return found
    hidden, heads = read_field(config, "hidden_size"), read_field(config, "num_attention_heads")
    heads = heads[0] if isinstance(heads, list | tuple) and heads else heads
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _shrink(settings: Mapping[str, Any], new_dim: int, default_factor: float, *, fixed: bool) -> dict[str, Any]:
    new: dict[str, Any] = {}
    factor = default_factor if fixed else settings.get("partial_rotary_factor") or default_factor
    kept = _even_factor(factor, new_dim)
    num_frequencies = int(new_dim * kept) // 2
    for name, value in settings.items():
        if isinstance(value, Mapping):  # one set of settings per kind of layer
            new[name] = _shrink(value, new_dim, default_factor, fixed=fixed)
        elif name == "partial_rotary_factor" and value:
            new[name] = kept
        elif name == "mrope_section" and value:
            new[name] = _apportion(value, num_frequencies)
        elif name in ("short_factor", "long_factor") and value:
            new[name] = list(value)[:num_frequencies]
        elif name == "original_max_position_embeddings" and value:
            new[name] = min(value, _POSITIONS)
        else:
            new[name] = value
    return new


def _even_factor(factor: float, head_dim: int) -> float:
    """`factor`, or the nearest one that rotates an even number of channels, at least two."""
    rotated = int(head_dim * factor)
    return factor if rotated >= 2 and rotated % 2 == 0 else max(2, rotated // 2 * 2) / head_dim


def _apportion(sections: list[int], total: int) -> list[int]:
    """Divides `total` in about the proportions of `sections`; nonempty sections stay nonempty."""
    parts = [max(1, section * total // sum(sections)) if section else 0 for section in sections]
    while sum(parts) != total:
        place = parts.index(max(parts)) if sum(parts) > total else parts.index(min(part for part in parts if part))
        parts[place] += 1 if sum(parts) < total else -1
    return parts
