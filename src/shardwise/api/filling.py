"""Models on the meta device, and what they are filled with once they are split."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.lora.inject import inject, inject_alike
from shardwise.parallel.build import as_dtype, build_meta_model, named_class, read_config, read_generation_config
from shardwise.parallel.construction import Construction
from shardwise.parallel.coverage import Allowed
from shardwise.parallel.loading import find_weights, load_weights
from shardwise.parallel.materialize import (
    attributes_of,
    draw_values,
    initialize_attributes,
    initialize_missing,
    record_missing,
)
from shardwise.parameters.registry import Registry, Source
from shardwise.parameters.source import note_source
from shardwise.plan.structure import fqn_of
from shardwise.runtime.adapter_facts import names_in_base
from shardwise.weights.conversion import Resolution
from shardwise.weights.foreign import config_place, open_weights
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.locate import HUB_OPTIONS

__all__ = ["Filling", "build_unfilled", "filling_for"]


@dataclass
class Filling:
    """What the tensors of a meta model will be: read from a checkpoint, or initialised as the unsplit model's were. A
    context manager that closes the checkpoint.

    Attributes:
        index: the checkpoint; None where nothing is read.
        found: what it has for the model, by the names that the model has now.
        unsplit: the tensors to be initialised, as they were built.
        attributes: the tensors that modules keep as plain attributes, as they were built, by their names in the base.
        dtype: what is read is converted to.
        later: how adapters that came in unrecorded are built, and what they are.
    """

    index: CheckpointIndex | None
    found: Resolution | None
    construction: Construction
    unsplit: dict[str, Tensor]
    attributes: dict[str, Tensor]
    dtype: torch.dtype | None
    later: list[tuple[Construction, dict[str, Tensor]]] = field(default_factory=list)

    def __enter__(self) -> Filling:
        return self

    def __exit__(self, *error: object) -> None:
        if self.index is not None:
            self.index.__exit__(*error)

    def describe(self) -> dict[str, str]:
        """What must be the same on every rank, by names: what tells the checkpoint from others."""
        return {} if self.index is None else {f"weights {key}": text for key, text in self.index.describe().items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Filling:
        return self  # it changes nothing in the model that it is asked about

    def inject(self, model: PreTrainedModel, adapter: Any) -> nn.Module:
        """PEFT's model around the meta model, whose adapters will be initialised as PEFT does it."""
        with self.construction:
            wrapped = inject(model, adapter)
        names = names_in_base(model)
        own = {fqn: value.detach() for fqn, value in model.named_parameters() if fqn not in names}
        self._rename(names)
        self.unsplit |= own
        return wrapped

    def with_adapters_of(self, model: PreTrainedModel) -> Filling:
        """What fills a model into which adapters came after it was built."""
        filling, names = replace(self, unsplit=dict(self.unsplit), later=[]), names_in_base(model)
        filling._rename(names)
        own = [fqn for fqn, value in model.named_parameters() if fqn not in names and value.is_meta]
        if own:
            fresh = build_meta_model(model.config, type(model), dtype=model.dtype, options={})
            with Construction() as construction, torch.device("meta"):
                inject_alike(model, fresh, fresh_values=True)
            tensors = dict(fresh.named_parameters())
            filling.later.append((construction, {fqn: tensors[fqn].detach() for fqn in own}))
        return filling

    def _rename(self, names: dict[str, str]) -> None:
        """Takes what was known of the tensors of the base by the names that they have among adapters."""
        self.unsplit = {fqn: self.unsplit[base] for fqn, base in names.items() if base in self.unsplit}
        if self.found is None:
            return
        known = {fqn: self.found.tensors[base] for fqn, base in names.items() if base in self.found.tensors}
        first = {base: fqn for fqn, base in reversed(names.items())}
        duplicates = {first[alias]: first[base] for alias, base in self.found.duplicates.items()}
        self.found = replace(self.found, tensors=known, duplicates=duplicates)

    def read_full(self, model: PreTrainedModel, wanted: Collection[int], *, seed: int) -> None:
        """Gives the parameters of the unsplit model whose ids are `wanted` their full values, on the CPU."""
        made: dict[int, nn.Parameter] = {}  # shared parameters stay shared
        for name, module in model.named_modules():
            for own, value in module._parameters.items():
                if value is None or id(value) not in wanted:
                    continue
                if id(value) not in made:
                    full = self._full(fqn_of(name, own), seed).to(value.dtype)
                    made[id(value)] = nn.Parameter(full, requires_grad=value.requires_grad)
                module._parameters[own] = made[id(value)]

    def _full(self, fqn: str, seed: int) -> Tensor:
        if self.found is not None and fqn in self.found.tensors:
            return self.found.tensors[fqn].read()
        return draw_values(self.construction, [self.unsplit[fqn]], f"{seed}/{fqn.rpartition('.')[0]}")[0]

    def fill(self, model: PreTrainedModel, registry: Registry, *, seed: int, reads: bool = True) -> None:
        """Gives what is still on the meta device its values: of this rank, which communicates nothing.

        Args:
            seed: of what no checkpoint holds.
            reads: whether the checkpoint is read; where it is not, its tensors have been filled otherwise.

        Raises:
            LoadError: the checkpoint holds NaN, or tied tensors differ.
            UnsupportedError: a tensor has no value.
        """
        real: set[str] = set()
        if reads and self.index is not None and self.found is not None:
            named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
            real = {registry.tied.get(fqn, fqn) for fqn, value in named if not value.is_meta}
            waits = {fqn: each for fqn, each in self.found.tensors.items() if registry.tied.get(fqn, fqn) not in real}
            ties = {alias: fqn for alias, fqn in self.found.duplicates.items() if alias in waits}
            found = replace(self.found, tensors=waits, duplicates=ties)
            load_weights(model, registry, self.index, found, dtype=self.dtype)
        for construction, unsplit in ((self.construction, self.unsplit), *self.later):
            initialize_missing(model, registry, construction, unsplit, seed=seed)
        initialize_attributes(model, self.construction, self.attributes, device=registry.mesh.device, seed=seed)
        if reads and self.index is not None and self.found is not None:
            read = {registry.tied.get(fqn, fqn) for fqn in self.found.tensors} - real
            note_source(model, registry, digest=self.index.digest(), drawn=registry.entries.keys() - read)
        else:
            registry.source = Source()


def build_unfilled(
    source: str | os.PathLike[str] | PreTrainedConfig,
    auto_class: Any,
    *,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | str | None,
    options: dict[str, Any],
    reads: bool = True,
) -> tuple[PreTrainedModel, Filling]:
    """A model on the meta device, and what will fill it; raises as `shardwise.load`.

    Args:
        config: instead of the one at `source`.
        options: as `shardwise.load` hands them on.
        reads: whether its weights are those of `source`, and not filled otherwise.
    """
    options = dict(options)
    allowed, key_mapping = Allowed.pop(options), options.pop("key_mapping", None)
    where = {name: options[name] for name in HUB_OPTIONS if name in options}
    index, found = None, None
    if isinstance(source, PreTrainedConfig):
        config = copy.deepcopy(source)
    else:
        if config is None:
            config, options = read_config(config_place(source), options)
        else:
            config = copy.deepcopy(config)
            options = {name: value for name, value in options.items() if name not in HUB_OPTIONS}
        index = open_weights(source, **where) if reads else None
    chosen = as_dtype(dtype) or config.dtype or _stored_dtype(index)
    with Construction() as construction:
        model = build_meta_model(config, auto_class, dtype=chosen, options=options)
    if index is not None:
        is_guess = auto_class is None and named_class(config) is None
        found = find_weights(model, index, allowed=allowed, is_guess=is_guess, key_mapping=key_mapping)
    unsplit = record_missing(model, construction, found.tensors if found else ())
    if not isinstance(source, PreTrainedConfig):
        model.config.name_or_path = model.name_or_path = os.fspath(source)
        read_generation_config(model, source, where)
    return model, Filling(index, found, construction, unsplit, attributes_of(model), chosen)


def filling_for(model: PreTrainedModel) -> Filling:
    """What fills the tensors of a model that are on the meta device, where nothing was recorded: values as `shardwise.
    load` draws them for its config.
    """
    base, filling = build_unfilled(model.config, type(model), dtype=model.dtype, options={})
    del base
    return filling.with_adapters_of(model)


def _stored_dtype(index: CheckpointIndex | None) -> torch.dtype | None:
    """The dtype of the checkpoint's first floating-point tensor, as transformers takes it."""
    entries = index.values() if index is not None else ()
    return next((entry.dtype for entry in entries if entry.dtype.is_floating_point), None)
