"""Shrinks a model's configuration to a tiny one of the same structure."""

import copy
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from shardwise.tiny import families as rules
from shardwise.tiny.families import (
    LAYER_CYCLES,
    LAYER_FLAGS,
    LAYER_PERIODS,
    LAYER_PREFIXES,
    LAYER_SUFFIXES,
    fields_of,
    is_count,
    layer_overrides,
    read_field,
    sub_configs,
)


def choose_layers(values: Mapping[str, Any], num_layers: int, wanted: int, *, repeats: int = 1) -> list[int]:
    """Returns the indices of the original layers that the tiny model keeps, ascending: at least `wanted`, `repeats` of
    each kind.

    Args:
        wanted: number of layers of the tiny model if there is only one kind.
    """
    kinds = [_kind(values, num_layers, index) for index in range(num_layers)]
    chosen = {index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < repeats}
    chosen |= set(range(_cycle(values)))
    for index in range(num_layers):
        if len(chosen) >= wanted:
            break
        chosen.add(index)
    return sorted(index for index in chosen if index < num_layers)


def layer_kinds(config: PreTrainedConfig) -> list[Hashable]:
    """Returns the kind of every layer of a model with one stack; empty if its config does not tell them."""
    values, num_layers = fields_of(config), getattr(config, "num_hidden_layers", None)
    if not is_count(num_layers) or len([*sub_configs(config)]) > 1 or _cycle(values) or layer_overrides(config):
        return []
    return [_kind(values, num_layers, index) for index in range(num_layers)]


def repeating_lengths(kinds: Sequence[Hashable]) -> tuple[int, int, int] | None:
    """Returns two numbers of first layers, and how often what the larger adds repeats; None if nothing does."""
    for cycle in range(1, len(kinds)):
        before = 1 + max((i for i in range(len(kinds) - cycle) if kinds[i] != kinds[i + cycle]), default=-1)
        few = before + cycle + (len(kinds) - before) % cycle
        if few + 2 * cycle < len(kinds):
            return few, few + cycle, (len(kinds) - few) // cycle
    return None


def shrink_layer_lists(values: Mapping[str, Any], num_layers: int, chosen: list[int]) -> dict[str, Any]:
    """Returns the attributes that describe each layer, for the chosen layers only."""
    new: dict[str, Any] = {}
    for name, value in values.items():
        if name in LAYER_PREFIXES and is_count(value):
            new[name] = sum(index < value for index in chosen)
        elif name in LAYER_SUFFIXES and is_count(value):
            new[name] = sum(index >= num_layers - value for index in chosen)
        elif name in LAYER_PERIODS and is_count(value) and value > 1:
            new.update(_shrink_period(values, name))
        elif _is_index_list(name, value, num_layers):
            new[name] = type(value)(position for position, index in enumerate(chosen) if index in value)
        elif _is_per_layer(value, num_layers):
            new[name] = type(value)(value[index] for index in chosen)
    return new


def _kind(values: Mapping[str, Any], num_layers: int, index: int) -> tuple[Hashable, ...]:
    """Returns the kind of layer `index`, by lists and counts."""
    kind: list[Hashable] = []
    for name, value in values.items():
        if name in LAYER_PREFIXES and is_count(value):
            kind.append(index < value)
        elif name in LAYER_SUFFIXES and is_count(value):
            kind.append(index >= num_layers - value)
        elif _is_index_list(name, value, num_layers):
            kind.append(index in value)
        elif _is_per_layer(value, num_layers):
            kind.append(repr(value[index]))
    return tuple(kind)


def _cycle(values: Mapping[str, Any]) -> int:
    """Returns the number of layers that a tiny model needs for every phase of its (shrunk) periods."""
    cycles = [len(value) for name, value in values.items() if name in LAYER_CYCLES and value]
    for name, value in values.items():
        if name in LAYER_PERIODS and is_count(value) and value > 1:
            cycles.append(_shrink_period(values, name)[name])
    return max(cycles, default=0)


def _shrink_period(values: Mapping[str, Any], name: str) -> dict[str, int]:
    """Returns a period of at most 2, or 4 with an offset, so that periods of 2 beside it stay visible."""
    period, offset_name = values[name], LAYER_PERIODS[name]
    if offset_name is None:
        return {name: min(period, 2)}
    new = min(period, 4)
    return {name: new, offset_name: values[offset_name] * new // period}


def _is_per_layer(value: object, num_layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == num_layers and num_layers > 1


def _is_index_list(name: str, value: object, num_layers: int) -> bool:
    """Returns whether a list holds indices of layers: ascending distinct integers, named after layers or indices."""
    return (
        isinstance(value, list | tuple)
        and name not in LAYER_FLAGS
        and any(word in name for word in ("layer", "idx", "indexes", "indices"))
        and all(is_count(each) and 0 <= each <= num_layers for each in value)
        and len(set(value)) == len(value)
    )


# Endings of fields that make training random: dropout, stochastic depth, masking of spectrograms, noise on routers.
_RANDOM = (
    *("dropout", "pdrop", "layerdrop", "drop_rate", "dropout_prob", "dropout_rate", "drop_path_rate", "drop_prob"),
    *("mask_time_prob", "mask_feature_prob", "jitter_noise", "jitter_eps", "_dropout_p"),
)
_TOKENS = ("token_id", "token_index", "token_ids")
_ROTARY = ("rope_parameters", "rope_scaling")
_SECTIONS = [16, 24, 24]
_POSITIONS = 32  # below the tiny model's maximum of 64, so that scaling beyond the original length stays visible


def shrink_config(
    config: PreTrainedConfig,
    *,
    num_layers: int | None = 2,
    vocab_size: int = 131,
    without_dropout: bool = False,
    num_parts: int = 1,
) -> PreTrainedConfig:
    """Returns a tiny copy of `config` with the same structure. `config` is not changed.

    Kept: model type, ties, biases, norms, activations, the grouping of heads, whether heads and hidden size are
    coupled, routing, ranks, and every kind of layer. Heads, experts and inner sizes are divisible by 2 and 4; the
    vocabulary is not.

    Args:
        config: config of any transformers model; nested configs are shrunk too.
        num_layers: layers of a stack whose layers are all alike; other stacks get one layer per kind. None keeps all
            layers of all stacks.
        vocab_size: rows of the embedding.
        without_dropout: sets every dropout, and other randomness of training, to 0.
        num_parts: divisor of the tiny model's heads if it divides the original's.
    """
    tiny = copy.deepcopy(config)
    hidden_sizes = {size for each in sub_configs(config) if isinstance(size := read_field(each, "hidden_size"), int)}
    shrinks = [
        _Shrink(each, hidden_sizes, num_layers=num_layers, vocab_size=vocab_size, num_parts=num_parts)
        for each in sub_configs(config)
    ]
    width = _width_of(heads for shrink in shrinks for heads in shrink.query_heads())
    for original, part, shrink in zip(sub_configs(config), list(sub_configs(tiny)), shrinks, strict=True):
        new = shrink.values(width)
        # Not through setattr: configurations check each assignment, and in between the values do not fit together.
        vars(part).update(new)
        vars(part).update(_shrink_rotary(original, part))
        if shrink.overrides:
            part.per_layer_config = shrink.new_overrides(new)
    apply_repeatable(tiny, without_dropout=without_dropout)
    return tiny


def keep_layers(config: PreTrainedConfig, *, num_layers: int = 2) -> PreTrainedConfig:
    """Returns a copy of `config` with few layers, of every kind, at its own sizes, with deterministic forwards."""
    short = copy.deepcopy(config)
    for original, part in zip(sub_configs(config), list(sub_configs(short)), strict=True):
        shrink = _Shrink(original, set(), num_layers=num_layers, vocab_size=0, num_parts=1)
        vars(part).update(shrink.layers())
        if shrink.overrides:
            part.per_layer_config = shrink.kept_overrides()
    return apply_repeatable(short)


def apply_repeatable(config: PreTrainedConfig, *, without_dropout: bool = True) -> PreTrainedConfig:
    """Makes forwards of `config` deterministic and without cache, in place.

    Tiny models are trained and never generate, and some models cannot make a cache for every order of their layers.
    """
    for part in sub_configs(config):
        if hasattr(part, "use_cache"):
            vars(part)["use_cache"] = False
        for name, value in fields_of(part).items() if without_dropout else ():
            if name.endswith(_RANDOM) and value and not isinstance(value, bool):  # a switch is no chance
                vars(part)[name] = _zero(value)
    return config


class _Shrink:
    """Computes the new values of one configuration, without its nested ones."""

    def __init__(
        self,
        config: PreTrainedConfig,
        hidden_sizes: set[int],
        *,
        num_layers: int | None,
        vocab_size: int,
        num_parts: int,
    ) -> None:
        self._config = config
        self._old = fields_of(config)
        self.overrides = layer_overrides(config)
        self._chosen: list[int] = []
        self._hidden_sizes = hidden_sizes
        self._hidden = read_field(config, "hidden_size")
        self._family = rules.FAMILIES.get(config.model_type)
        self._num_layers = num_layers
        self._vocab_size = vocab_size
        self._num_parts = num_parts
        self._width = 0

    def query_heads(self) -> list[int]:
        """Returns the numbers of query heads of the tiny model, of every kind."""
        counts = (value for name, value in self._old.items() if name in rules.QUERY_HEADS)
        return [self._query_heads(value) for value in counts if is_count(value)]

    def values(self, width: int) -> dict[str, Any]:
        """Returns the changed attributes and their values, in a tiny model of hidden size `width`."""
        self._width = width
        new = self.layers()
        sizes = {**self._old, **new}
        for name, value in sizes.items():
            if isinstance(value, list | tuple) and value and all(is_count(each) for each in value):
                new[name] = type(value)(self._size(name, each) for each in value)
            elif is_count(value):
                new[name] = self._size(name, value)
        new.update(self._tokens({**self._old, **new}))
        return new | {
            name: value
            for name, value in (self._family.set.items() if self._family else ())
            if self._num_layers is not None or name not in rules.LAYER_COUNTS
        }

    def new_overrides(self, new: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Returns by layer the fields in which it differs, in the original's proportions."""
        return {
            place: {name: self._override(name, value, new) for name, value in fields.items()}
            for place, fields in self.kept_overrides().items()
        }

    def kept_overrides(self) -> dict[int, Mapping[str, Any]]:
        """Returns by layer the fields in which it differs, unchanged."""
        kept = enumerate(self._chosen)
        return {place: self.overrides[index] for place, index in kept if index in self.overrides}

    def _override(self, name: str, value: Any, new: Mapping[str, Any]) -> Any:
        rest = self._old.get(name)
        if not is_count(value) or not is_count(rest):
            return value
        if value == rest or not rest or not value:
            return new.get(name, rest) if value == rest else self._size(name, value)
        if name in rules.CAPS:
            return self._size(name, value)
        unit = 2 if value % 2 == 0 else 1  # halves of heads rotate
        return max(1, round(new.get(name, rest) * value / rest / unit) * unit)

    def layers(self) -> dict[str, Any]:
        """Returns the changed attributes that count layers or describe each."""
        total = read_field(self._config, "num_hidden_layers")
        new: dict[str, Any] = {}
        count = self._num_layers
        if count is None:
            self._chosen = list(range(total)) if isinstance(total, int) else []
            return new
        if isinstance(total, int) and total > 0:
            differing = {"overrides": [self.overrides.get(index) for index in range(total)]} if self.overrides else {}
            repeats = self._family.repeats if self._family else 1
            self._chosen = choose_layers(self._old | differing, total, count, repeats=repeats)
            new = shrink_layer_lists(self._old, total, self._chosen)
            count = len(self._chosen)
        for name, value in self._old.items():
            if name in rules.LAYER_COUNTS and is_count(value):
                new[name] = min(value, count) if value != total else count
        fixed = self._family.set if self._family else {}
        return new | {name: value for name, value in fixed.items() if name in rules.LAYER_COUNTS}

    def _size(self, name: str, value: int) -> int:
        if name in rules.QUERY_HEADS:
            return self._query_heads(value)
        if name in rules.KEY_VALUE_HEADS:
            return self._key_value_heads(name, value)
        if name in rules.HEAD_DIMS:
            return self._head_dim(name, value)
        if name in rules.RANKED_WIDTHS:
            return self._scaled(value, multiple=16)
        if name in rules.FEED_FORWARDS:
            return self._scaled(value, multiple=16, distinct=True)
        if name in rules.VOCABULARIES:
            return min(value, self._vocab_size)
        if self._num_layers is None and name in rules.STAGE_DEPTHS:
            return value
        return min(value, rules.CAPS.get(name, value))

    def _key_value_heads(self, name: str, value: int) -> int:
        """As many as query heads, one, or a number that several query heads share, like the original."""
        query = next(
            (found for other in rules.KEY_VALUE_HEADS[name] if (found := read_field(self._config, other))), value
        )
        query = max(query) if isinstance(query, list | tuple) else query
        if value >= query:
            return self._query_heads(query)
        if self._num_parts % value == 0 and query % self._num_parts == 0:
            return value  # every part holds one of them, and how many hold the same is part of the plan
        if value == 1:
            return 1
        fewer = min(self._query_heads(query) // 2, 4 if value >= 4 else 2)
        return self._num_parts if value % self._num_parts == 0 and fewer % self._num_parts else fewer

    def _query_heads(self, value: int) -> int:
        """8, or a multiple of `num_parts`, with a key/value head for each rank if those divide too."""
        if value in (1, 2, 4):
            return value
        shared = [each for name in rules.KEY_VALUE_HEADS if isinstance(each := self._old.get(name), int)]
        per_rank = any(1 < each < value and each % self._num_parts == 0 for each in shared)
        unit = 2 * self._num_parts if per_rank else self._num_parts
        return rules.HEADS if value % self._num_parts else -(-rules.HEADS // unit) * unit

    def _head_dim(self, name: str, value: int) -> int:
        coupled, decoupled = rules.HEAD_DIMS[name]
        for other in ("qk_rope_head_dim", "qk_head_dim"):  # under latent attention `head_dim` repeats one of both
            if name == "head_dim" and read_field(self._config, other) == value:
                return rules.HEAD_DIMS[other][0]
        heads = read_field(self._config, "num_attention_heads")
        if coupled == decoupled or not is_count(heads) or not is_count(self._hidden):
            return coupled
        return self._width // self._query_heads(heads) if heads * value == self._hidden else decoupled

    def _scaled(self, value: int, *, multiple: int, distinct: bool = False) -> int:
        """In the original's ratio to the hidden size, between a quarter of it and four times it."""
        if value in self._hidden_sizes and not (distinct and value != self._hidden):
            return self._width
        if value == 0:
            return 0
        hidden = self._hidden if is_count(self._hidden) else max(self._hidden_sizes, default=value)
        scaled = round(value * self._width / hidden / multiple) * multiple
        return min(max(scaled, multiple), 4 * self._width)

    def _tokens(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns special tokens inside the vocabulary, distinct like the original's."""
        vocab_size = values.get("vocab_size", self._vocab_size)
        vocab_size = vocab_size if isinstance(vocab_size, int) else self._vocab_size
        names = [name for name in values if name.endswith(_TOKENS)]
        found = {each for name in names for each in tree_leaves(values[name]) if is_count(each) and each >= vocab_size}
        moved = {each: vocab_size - 1 - place % max(1, vocab_size // 2) for place, each in enumerate(sorted(found))}
        return {
            name: [moved.get(each, each) for each in value] if isinstance(value, list) else moved.get(value, value)
            for name in names
            if isinstance(value := values[name], int | list)
        }


def _zero(value: Any) -> Any:
    """Returns zero probability, for one rate or a list of rates."""
    return type(value)(0.0 for _ in value) if isinstance(value, list | tuple) else 0.0


def _width_of(heads: Iterable[int]) -> int:
    """Returns a hidden size divisible by all these numbers of heads, with at least 4 channels per head."""
    counts = {1, *heads}
    together = math.lcm(*counts)
    return -(-max(rules.HIDDEN, 4 * max(counts)) // together) * together


def _shrink_rotary(original: PreTrainedConfig, tiny: PreTrainedConfig) -> dict[str, Any]:
    """Returns the rotary attributes of `tiny` that its head size changes, given those of `original`."""
    old_dim, new_dim = _rotated_dim(original), _rotated_dim(tiny)
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
    for name in _ROTARY:
        if isinstance(values.get(name), dict):
            new[name] = _shrink_settings(values[name], whole_dim or new_dim, default, fixed=factor is not None)
    unchecked = getattr(tiny, "ignore_keys_at_rope_validation", None) or ()
    rope = new.get("rope_parameters") if "mrope_section" in unchecked else None  # of time, height and width
    for each in [value for value in rope.values() if isinstance(value, dict)] or [rope] if rope else ():
        if "mrope_section" not in each:
            rotated = (whole_dim or new_dim) * (each.get("partial_rotary_factor") or default)
            each["mrope_section"] = _apportion(_SECTIONS, int(rotated) // 2)
    return new


def _rotated_dim(config: PreTrainedConfig) -> int | None:
    for name in ("qk_rope_head_dim", "head_dim", "attention_head_dim", "kv_channels", "d_kv"):
        if isinstance(found := read_field(config, name), int) and found > 0:
            return found
    hidden, heads = read_field(config, "hidden_size"), read_field(config, "num_attention_heads")
    heads = heads[0] if isinstance(heads, list | tuple) and heads else heads
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _shrink_settings(
    settings: Mapping[str, Any], new_dim: int, default_factor: float, *, fixed: bool
) -> dict[str, Any]:
    new: dict[str, Any] = {}
    factor = default_factor if fixed else settings.get("partial_rotary_factor") or default_factor
    kept = _even_factor(factor, new_dim)
    num_frequencies = int(new_dim * kept) // 2
    for name, value in settings.items():
        if isinstance(value, Mapping):  # one set of settings per kind of layer
            new[name] = _shrink_settings(value, new_dim, default_factor, fixed=fixed)
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
