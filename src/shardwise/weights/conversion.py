"""Adapter over transformers' weight conversions: checkpoint keys to a model's tensors, and back.

transformers owns the rules: which keys are renamed, which tensors are fused, split or transposed, which may be missing.
Here its objects run on lazy tensors. The result is no loaded weights, but for each tensor the origin of each box.
Written against transformers 5.17 to 5.24, using from it

- `core_model_loading`: `rename_source_key`, `revert_weight_conversion`, `dot_natural_key`, `WeightConverter`,
  `WeightRenaming` (`add_tensor`, `convert`, `was_used`), `SkipParameters`;
- `conversion_mapping.get_model_conversion_mapping`;
- on models: `base_model_prefix`, `all_tied_weights_keys`, `_keys_to_ignore_on_save`, `_weight_conversions`,
  `_adjust_missing_and_unexpected_keys`.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    SkipParameters,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from shardwise.errors import UnsupportedError
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.lazy import LazyTensor
from shardwise.weights.nodes import Store, StoredTensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Resolution:
    """Origin of every tensor of a model, and the differences that transformers would report.

    Attributes:
        tensors: FQN to its canonical tensor, of the right shape. Has all tied names if one of them is stored.
        unexpected: Renamed keys of the checkpoint that the model does not have.
        mismatched: FQN to (shape in the checkpoint, shape in the model); they are initialized too.
        conversion_errors: FQN to the text of a conversion's error; the FQN is also in `missing`.
        duplicates: Tied FQN to the FQN it is tied to, if the checkpoint holds both.
    """

    tensors: Mapping[str, LazyTensor]
    missing: frozenset[str]
    unexpected: frozenset[str]
    mismatched: Mapping[str, tuple[Shape, Shape]]
    conversion_errors: Mapping[str, str]
    duplicates: Mapping[str, str]


def resolve_keys(
    model: PreTrainedModel,
    index: CheckpointIndex,
    shapes: Mapping[str, Shape],
    *,
    key_mapping: Mapping[str, str] | None = None,
    prefix: str = "",
) -> Resolution:
    """Finds the tensors of the checkpoint from which each tensor of `model` is made. Reads no weights.

    As a side effect, `model._weight_conversions` records the used conversions. transformers remembers the checkpoint's
    format there for saving.

    Args:
        shapes: FQN to canonical shape for the unsplit model: all of `state_dict()` before any split.
        key_mapping: See `from_pretrained`: patterns of checkpoint keys to their replacements.
        prefix: Removed from the keys that begin with it.
    """
    conversions = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    collected = _Collected(model, shapes, conversions)
    for key in sorted(index, key=dot_natural_key):
        collected.add(key.removeprefix(prefix), LazyTensor.of_node(index.node(key)))
    collected.convert()
    duplicates = collected.tie()
    model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
    info = SimpleNamespace(missing_keys=collected.missing, unexpected_keys=collected.unexpected)
    model._adjust_missing_and_unexpected_keys(info)
    return Resolution(
        tensors=collected.tensors,
        missing=frozenset(info.missing_keys),
        unexpected=frozenset(info.unexpected_keys),
        mismatched=collected.mismatched,
        conversion_errors=collected.conversion_errors,
        duplicates=duplicates,
    )


# What conversions may ask of the model. Some compare a tensor with the parameter it becomes, and a split model's
# parameters have local shapes; everything else is the model's own answer.
class _CanonicalModel:
    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, Shape]) -> None:
        self._model = model
        self._shapes = shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        if name not in self._shapes:
            raise AttributeError(f"the model has no parameter {name!r}")
        return torch.empty(self._shapes[name], device="meta")

    get_parameter_or_buffer = get_parameter


class _Collected:
    """One pass of transformers' loading over lazy tensors, and its findings."""

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, Shape], conversions: list[Any]) -> None:
        self._model = model
        self._canonical = _CanonicalModel(model, shapes)
        self._shapes = shapes
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._by_pattern = {
            pattern: converter for converter in self._converters for pattern in converter.source_patterns
        }
        self._plain: dict[str, LazyTensor] = {}
        self._pending: dict[str, Any] = {}
        self.tensors: dict[str, LazyTensor] = {}
        self.missing: set[str] = set(shapes)
        self.unexpected: set[str] = set()
        self.mismatched: dict[str, tuple[Shape, Shape]] = {}
        self.conversion_errors: dict[str, str] = {}

    def add(self, key: str, tensor: LazyTensor) -> None:
        """Renames `key` and passes its tensor to the matching conversion."""
        name, pattern = self._rename(key, self._renamings, self._converters)
        if name not in self._shapes and key in self._shapes:
            name, pattern = self._rename(key, [], [])
        if name in self._shapes:
            if pattern is None or name in self._plain:  # most only have a name to find; the first key that does has it
                self._plain.setdefault(name, tensor)
                return
            if name not in self._pending:  # every target has a converter of its own, which several keys may feed
                self._pending[name] = deepcopy(self._by_pattern[pattern])
            self._pending[name].add_tensor(name, key, pattern, tensor)
        elif pattern is not None:
            targets = self._by_pattern[pattern].target_patterns
            self.unexpected.update(name.replace(targets[0], target) for target in targets)
        else:
            self.unexpected.add(name)

    def _rename(self, key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        return rename_source_key(key, renamings, converters, self._model.base_model_prefix, self._shapes)

    def convert(self) -> None:
        """Runs the conversions. Records errors; the results of a failed conversion stay missing."""
        info = SimpleNamespace(missing_keys=self.missing, conversion_errors=self.conversion_errors)
        for name, tensor in self._plain.items():
            self._take(name, tensor)
        for name, transform in self._pending.items():
            try:
                made = transform.convert(name, model=self._canonical, config=self._model.config, loading_info=info)
            except SkipParameters:
                continue
            for target, value in made.items():
                self._take(target, value[0] if isinstance(value, list) else value)

    def _take(self, target: str, tensor: torch.Tensor) -> None:
        if target not in self._shapes:
            self.unexpected.add(target)
            return
        self.missing.discard(target)
        if not isinstance(tensor, LazyTensor):  # computed at once: see [Note: operations outside the algebra]
            tensor = LazyTensor.of_value(tensor)
        shape, wanted = tuple(tensor.shape), tuple(self._shapes[target])
        if shape == wanted:
            self.tensors[target] = tensor
        else:
            self.mismatched[target] = (shape, wanted)

    def tie(self) -> dict[str, str]:
        """Gives all names of a tied tensor the stored one. Returns the names stored twice."""
        groups: dict[str, list[str]] = {}
        for target, source in self._model.all_tied_weights_keys.items():
            groups.setdefault(source, [source]).append(target)
        duplicates: dict[str, str] = {}
        for names in groups.values():
            # In the order of preference that transformers has: the source, then its targets in order.
            stored = [name for name in names if name in self.tensors]
            if not stored:
                continue
            duplicates.update(dict.fromkeys(stored[1:], stored[0]))
            for name in names:
                self.tensors.setdefault(name, self.tensors[stored[0]])
                self.missing.discard(name)
        return duplicates


@dataclass(frozen=True)
class ExportGroup:
    """Tensors of a model that are needed together to write some tensors of a checkpoint."""

    fqns: tuple[str, ...]
    names: tuple[str, ...]
    _made: tuple[LazyTensor, ...]
    _store: "_StateStore"

    @property
    def described(self) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
        """Name, dtype and shape of every tensor that `build` yields, in order."""
        return tuple((name, lazy.dtype, tuple(lazy.shape)) for name, lazy in zip(self.names, self._made, strict=True))

    def build(self, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the checkpoint's tensors by name, one at a time, from the canonical tensors `state` of all `fqns`.

        A tensor that is only renamed is the one in `state`; the others are new.
        """
        self._store.tensors = {fqn: state[fqn].detach() for fqn in self.fqns}
        try:
            for name, lazy in zip(self.names, self._made, strict=True):
                yield name, self._store.tensors[lazy.node.key] if isinstance(lazy.node, StoredTensor) else lazy.read()
        finally:
            self._store.tensors = {}


class _StateStore(Store):
    def __init__(self) -> None:
        self.tensors: Mapping[str, torch.Tensor] = {}

    def map_tensor(self, key: str) -> torch.Tensor:
        if key not in self.tensors:
            raise UnsupportedError(
                f"a weight conversion computes with {key} where it should only rearrange it",
                why="an export converts tensors one group at a time, as they are gathered",
                fix="use shardwise.full_state_dict(model)",
            )
        return self.tensors[key]


def has_tied_weights(model: nn.Module, tensor_of: Mapping[str, str]) -> bool:
    """Returns whether all names that transformers ties share one tensor.

    Args:
        tensor_of: name to the name of its tensor; missing names have their own tensor.
    """
    ties = model.all_tied_weights_keys.items() if isinstance(model, PreTrainedModel) else ()
    return all(tensor_of.get(target, target) == tensor_of.get(source, source) for target, source in ties)


def untie(config: Any) -> None:
    """Sets `tie_word_embeddings` to False in a config and its nested configs, if the class keeps that value.

    T5's does not. transformers ties weights only if a checkpoint has one of them, or equal ones.
    """
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
            part.tie_word_embeddings = type(part).from_dict(part.to_dict()).tie_word_embeddings


def plan_export(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], *, is_tied: bool = True
) -> tuple[ExportGroup, ...]:
    """Plans writing `model` in the format of its checkpoint: the smallest groups of tensors that convert together.

    transformers' reverse conversion runs once over the model's lazy tensors. The result shows which tensors belong
    together; most groups have one tensor. Of tied names only one is written; names that the model never saves are left
    out.

    Args:
        tensors: FQN to a (meta) tensor of the canonical shape and dtype to save, for the unsplit model.
        is_tied: whether names that transformers ties share one tensor (`has_tied_weights`).
    """
    store = _StateStore()
    dropped: set[str] = set()
    if isinstance(model, PreTrainedModel):
        if is_tied:
            dropped = {target for target, source in model.all_tied_weights_keys.items() if source in tensors}
        dropped.update(model._keys_to_ignore_on_save or ())
    lazies = {
        fqn: LazyTensor.of_node(StoredTensor(store, fqn, tuple(tensor.shape), tensor.dtype))
        for fqn, tensor in tensors.items()
        if fqn not in dropped
    }
    made = lazies
    if isinstance(model, PreTrainedModel):
        canonical = _CanonicalModel(model, {fqn: tuple(tensor.shape) for fqn, tensor in tensors.items()})
        made = revert_weight_conversion(canonical, lazies)
    return tuple(
        ExportGroup(fqns, names, tuple(made[name] for name in names), store) for fqns, names in _connected(made)
    )


def _connected(made: Mapping[str, LazyTensor]) -> Iterable[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Groups names that share sources, in order: (sources, names)."""
    group_of: dict[str, dict[str, None]] = {}
    names_of: dict[int, list[str]] = {}
    for name, lazy in made.items():
        sources = dict.fromkeys(lazy.keys)
        names = [name]
        for known in {id(group_of[key]): group_of[key] for key in sources if key in group_of}.values():
            sources = {**known, **sources}
            names = [*names_of.pop(id(known)), *names]
        for key in sources:
            group_of[key] = sources
        names_of[id(sources)] = names
    groups = {id(group): group for group in group_of.values()}
    return [(tuple(groups[key]), tuple(names)) for key, names in names_of.items()]
