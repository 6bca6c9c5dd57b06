"""Random legal configurations: other heads, widths, experts, ties, biases and layers than any tiny model has.

A tiny model's configuration is changed in a few places at once, by what its fields mean; what is legal is what
transformers builds and trains. Everything is drawn from one seed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence

import torch
from transformers import PreTrainedConfig

from shardwise.tiny import families as rules
from shardwise.tiny.families import fields_of, layer_overrides, read_field, sub_configs
from shardwise.tiny.inputs import loss_or_surrogate
from shardwise.tiny.models import build_tiny_model, make_batch, set_runnable_mode, shrink_config
from shardwise.tiny.shrink import shrink_layer_lists
from sweep.known import default_config, model_class

__all__ = ["random_config"]

_TRIES = 60
_MAX_CHANGES = 6
_MAX_LAYERS = 4
_KEPT_FLAGS = ("use_cache", "is_decoder", "is_encoder_decoder", "add_cross_attention", "output_", "return_", "chunk")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_expert")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_OTHERS = tuple(name for name in rules.CAPS if name not in (*_EXPERTS, *_CHOSEN))

Change = Callable[[PreTrainedConfig, random.Random], str]


def random_config(model_type: str, task: str, class_name: str, *, seed: int) -> tuple[PreTrainedConfig, list[str]]:
    """A legal configuration drawn from `seed`, and what is changed in it; nothing where no change was legal.

    Raises:
        UnsupportedError: the architecture has no tiny model.
    """
    rng = random.Random(f"{model_type}/{class_name}/{seed}")
    tiny = shrink_config(default_config(model_type, task=task), num_layers=_MAX_LAYERS, without_dropout=True)
    for number in range(_TRIES):
        config = copy.deepcopy(tiny)
        num_changes = max(1, rng.randint(2, _MAX_CHANGES) - number // 8)
        changes = [change(config, rng) for change in rng.sample(_CHANGES, num_changes)]
        if any(changes) and _trains(config, class_name):
            return config, [text for text in changes if text]
    return tiny, []


def _trains(config: PreTrainedConfig, class_name: str) -> bool:
    """Whether transformers builds the model and trains it, and what it computes is finite and not all zero."""
    try:
        for part in sub_configs(config):
            validate = getattr(part, "validate", None)
            if validate is not None:
                validate()
        model = build_tiny_model(config, model_class(class_name), seed=0)
        batch = make_batch(model, seed=0)
        set_runnable_mode(model, batch)
        loss = loss_or_surrogate(model(**batch))
        loss.backward()
    except Exception:  # noqa: BLE001 - that is what illegal means
        return False
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return all(bool(torch.isfinite(value).all()) for value in (loss, *gradients))


def _set(config: PreTrainedConfig, names: Iterable[str], old: int, new: int) -> None:
    """Gives `new` to the fields of these names that have the value `old`, in every part of the configuration."""
    for part in sub_configs(config):
        vars(part).update({name: new for name, value in fields_of(part).items() if name in names and value == old})


def _pick(config: PreTrainedConfig, names: Iterable[str], rng: random.Random) -> tuple[str, int] | None:
    """One field of these names that is an integer above 0, and its value."""
    found = {
        (name, value)
        for part in sub_configs(config)
        for name, value in fields_of(part).items()
        if name in names and isinstance(value, int) and not isinstance(value, bool) and value > 0
    }
    return rng.choice(sorted(found)) if found else None


def _change_size(config: PreTrainedConfig, rng: random.Random, names: Iterable[str], sizes: Sequence[int]) -> str:
    picked = _pick(config, names, rng)
    if picked is None:
        return ""
    new = rng.choice(sizes)
    _set(config, names, picked[1], new)
    return f"{picked[0]}={new}"


def _coupled(config: PreTrainedConfig, heads: int) -> int:
    """The hidden size that is these heads times their size; 0 where none is."""
    for part in sub_configs(config):
        hidden, size = read_field(part, "hidden_size"), read_field(part, "head_dim")
        own = read_field(part, "num_attention_heads")
        if own == heads and isinstance(hidden, int) and hidden % heads == 0 and size in (None, hidden // heads):
            return hidden
    return 0


def _heads(config: PreTrainedConfig, rng: random.Random) -> str:
    """Other query heads, and key/value heads that they are a multiple of; the hidden size goes with them."""
    picked = _pick(config, rules.QUERY_HEADS, rng)
    if picked is None:
        return ""
    old, new = picked[1], rng.choice((1, 2, 3, 4, 4, 5, 6, 6, 8, 8, 10, 12, 12, 16))
    hidden = _coupled(config, old)
    if hidden:
        _set(config, rules.RANKED_WIDTHS, hidden, hidden // old * new)
    _set(config, rules.QUERY_HEADS, old, new)
    text = f"{picked[0]}={new}"
    for name in rules.KEY_VALUE_HEADS:
        values = {vars(part)[name] for part in sub_configs(config) if isinstance(vars(part).get(name), int)}
        for value in sorted(values):
            fewer = rng.choice([size for size in range(1, new + 1) if new % size == 0])
            _set(config, (name,), value, new if value == old and rng.random() < 0.6 else fewer)
            text += f" {name}={vars(config).get(name)}"
    return text


def _head_size(config: PreTrainedConfig, rng: random.Random) -> str:
    """Another size of heads; the hidden size goes with it."""
    new = rng.choice((2, 4, 6, 8, 10, 12, 14, 16, 20, 24))
    heads = _pick(config, rules.QUERY_HEADS, rng)
    hidden = _coupled(config, heads[1]) if heads is not None else 0
    if heads is not None and hidden and rng.random() < 0.7:
        _set(config, rules.HEAD_DIMS, hidden // heads[1], new)
        _set(config, rules.RANKED_WIDTHS, hidden, heads[1] * new)
        return f"head size {new}, hidden size {heads[1] * new}"
    return _change_size(config, rng, tuple(rules.HEAD_DIMS), (new,))


def _experts(config: PreTrainedConfig, rng: random.Random) -> str:
    text = _change_size(config, rng, _EXPERTS, range(2, 10))
    return text and text + " " + _change_size(config, rng, _CHOSEN, (1, 2, 3))


def _flag(config: PreTrainedConfig, rng: random.Random) -> str:
    """A bias, a tie, a norm, or whatever else can be on or off."""
    flags = sorted(
        {
            name
            for part in sub_configs(config)
            for name, value in fields_of(part).items()
            if isinstance(value, bool) and not any(kept in name for kept in _KEPT_FLAGS)
        }
    )
    if not flags:
        return ""
    name = rng.choice(flags)
    for part in sub_configs(config):
        if isinstance(vars(part).get(name), bool):
            vars(part)[name] = not vars(part)[name]
    return f"{name} flipped"


def _layers(config: PreTrainedConfig, rng: random.Random) -> str:
    """Some of the layers: fewer, and perhaps not of every kind."""
    text = ""
    for part in sub_configs(config):
        values, total = fields_of(part), read_field(part, "num_hidden_layers")
        if not isinstance(total, int) or total < 2 or layer_overrides(part):
            continue
        chosen = sorted(rng.sample(range(total), rng.randint(1, total)))
        counts = {name: len(chosen) for name, value in values.items() if name in rules.LAYER_COUNTS and value == total}
        vars(part).update(shrink_layer_lists(values, total, chosen) | counts)
        text = f"layers {chosen} of {total}"
    return text


_CHANGES: tuple[Change, ...] = (
    _heads,
    _heads,
    _head_size,
    lambda config, rng: _change_size(config, rng, rules.RANKED_WIDTHS, range(8, 120)),
    lambda config, rng: _change_size(config, rng, rules.FEED_FORWARDS, range(3, 200)),
    lambda config, rng: _change_size(config, rng, rules.FEED_FORWARDS, range(3, 200)),
    lambda config, rng: _change_size(config, rng, rules.VOCABULARIES, range(40, 300)),
    lambda config, rng: _change_size(config, rng, _OTHERS, range(1, 40)),
    _experts,
    _flag,
    _flag,
    _layers,
    _layers,
)
