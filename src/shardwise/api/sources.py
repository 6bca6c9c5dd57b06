"""Sources of a meta model's values: the files of a checkpoint, or the model's own initialization."""

import copy
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.api.checkpoints import fill_model, holds_all
from shardwise.api.prepare import prepare
from shardwise.checkpoint.background import join_saves
from shardwise.checkpoint.load import open_on_all_ranks
from shardwise.comm.agree import agree_on, run_serially
from shardwise.comm.collectives import all_gather_objects
from shardwise.errors import UnsupportedError
from shardwise.lora.inject import inject, inject_alike
from shardwise.mesh import Mesh
from shardwise.parallel import loading
from shardwise.parallel.build import (
    Construction,
    as_dtype,
    build_meta_model,
    has_meta,
    named_class,
    read_config,
    read_generation_config,
)
from shardwise.parameters.registry import Registry, Source, find_parameters, note_source
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapter_facts import find_model, has_adapters, names_in_base
from shardwise.weights.conversion import Resolution
from shardwise.weights.foreign import config_place, open_weights
from shardwise.weights.index import CheckpointIndex
from shardwise.weights.locate import HUB_OPTIONS

Place = str | os.PathLike[str]

SOURCE = "_shardwise_source"  # the attribute of a lazily loaded model that keeps its `WeightSource`

SAME_FILES: dict[str, Any] = {
    "what": "the ranks load different models",
    "fix": "load the same files on every rank: from a directory that all machines share, or a pinned revision",
}


@dataclass
class WeightSource:
    """Source of a meta model's values: read from a checkpoint, else initialized like the unsplit model.

    Attributes:
        found: tensors of the checkpoint by the model's names.
        construction: recorded construction of the model.
        unsplit: unsplit meta tensors that will be initialized.
        attributes: meta tensors that modules hold as plain attributes, by their names in the base.
        later: recorded construction and tensors of adapters that were added later.
    """

    index: CheckpointIndex | None
    found: Resolution | None
    construction: Construction
    unsplit: dict[str, Tensor]
    attributes: dict[str, Tensor]
    dtype: torch.dtype | None
    later: list[tuple[Construction, dict[str, Tensor]]] = field(default_factory=list)

    def close(self) -> None:
        """Closes the checkpoint."""
        if self.index is not None:
            self.index.__exit__()

    def describe(self) -> dict[str, str]:
        """Returns the digests of the checkpoint's tensors by name, which must be equal on every rank."""
        return {} if self.index is None else {f"weights {key}": text for key, text in self.index.describe().items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightSource":
        return self  # of a copied model, too

    def inject(self, model: PreTrainedModel, adapter: Any) -> nn.Module:
        """Wraps the meta model in PEFT's model, and records how PEFT initializes the adapters."""
        with self.construction:
            wrapped = inject(model, adapter)
        names = names_in_base(model)
        own = {fqn: value.detach() for fqn, value in model.named_parameters() if fqn not in names}
        self._rename(names)
        self.unsplit |= own
        return wrapped

    def with_adapters_of(self, model: PreTrainedModel) -> "WeightSource":
        """Returns the source of a model that received adapters after it was built."""
        source, names = replace(self, unsplit=dict(self.unsplit), later=[]), names_in_base(model)
        source._rename(names)
        own = [fqn for fqn, value in model.named_parameters() if fqn not in names and value.is_meta]
        if own:
            fresh = build_meta_model(model.config, type(model), dtype=model.dtype, options={})
            with Construction() as construction, torch.device("meta"):
                inject_alike(model, fresh, fresh_values=True)
            tensors = dict(fresh.named_parameters())
            source.later.append((construction, {fqn: tensors[fqn].detach() for fqn in own}))
        return source

    def _rename(self, names: dict[str, str]) -> None:
        """Renames the base's tensors to their names in the model with adapters."""
        self.unsplit = {fqn: self.unsplit[base] for fqn, base in names.items() if base in self.unsplit}
        if self.found is not None:
            known = {fqn: self.found.tensors[base] for fqn, base in names.items() if base in self.found.tensors}
            first = {base: fqn for fqn, base in reversed(names.items())}
            duplicates = {first[alias]: first[base] for alias, base in self.found.duplicates.items()}
            self.found = replace(self.found, tensors=known, duplicates=duplicates)

    def fill(self, model: PreTrainedModel, registry: Registry, *, seed: int, reads: bool = True) -> None:
        """Fills this rank's part of the tensors that are still on the meta device.

        Args:
            reads: False if the checkpoint's tensors are already filled from elsewhere.

        Raises:
            LoadError: tied tensors differ.
            UnsupportedError: a tensor has no value.

        Communicates: nothing.
        """
        read = None
        if reads and self.index is not None and self.found is not None:
            named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
            real = {registry.tied.get(fqn, fqn) for fqn, value in named if not value.is_meta}
            waits = {fqn: each for fqn, each in self.found.tensors.items() if registry.tied.get(fqn, fqn) not in real}
            ties = {alias: fqn for alias, fqn in self.found.duplicates.items() if alias in waits}
            read = {registry.tied.get(fqn, fqn) for fqn in waits}
            found = replace(self.found, tensors=waits, duplicates=ties)
            loading.load_weights(model, registry, found, dtype=self.dtype)
        for construction, unsplit in ((self.construction, self.unsplit), *self.later):
            loading.initialize_missing(model, registry, construction, unsplit, seed=seed)
        loading.initialize_attributes(model, self.construction, self.attributes, device=registry.mesh.device, seed=seed)
        registry.source = Source()
        if read is not None and self.index is not None:
            note_source(model, registry, digest=self.index.digest(), drawn=registry.entries.keys() - read)


def build_meta(
    source: Place | PreTrainedConfig,
    auto_class: Any,
    *,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | str | None,
    options: dict[str, Any],
    reads: bool = True,
) -> tuple[PreTrainedModel, WeightSource]:
    """Builds a meta model and the source of its values. Raises the errors of `shardwise.load`.

    Args:
        config: replaces the config at `source`.
        options: see `shardwise.load`.
        reads: whether the weights at `source` are read.
    """
    options = dict(options)
    allowed, key_mapping = loading.Allowed.pop(options), options.pop("key_mapping", None)
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
    stored = (entry.dtype for entry in index.values() if entry.dtype.is_floating_point) if index is not None else ()
    chosen = as_dtype(dtype) or config.dtype or next(iter(stored), None)  # as transformers takes it
    with Construction() as construction:
        model = build_meta_model(config, auto_class, dtype=chosen, options=options)
    if index is not None:
        is_guess = auto_class is None and named_class(config) is None
        found = loading.find_weights(model, index, allowed=allowed, is_guess=is_guess, key_mapping=key_mapping)
    unsplit = loading.record_missing(model, construction, found.tensors if found else ())
    if not isinstance(source, PreTrainedConfig):
        model.config.name_or_path = model.name_or_path = os.fspath(source)
        read_generation_config(model, source, where)
    return model, WeightSource(index, found, construction, unsplit, loading.attributes_of(model), chosen)


def split_lazily(
    model: nn.Module,
    mesh: Mesh,
    spec: ParallelSpec,
    *,
    checkpoint: Place | None = None,
    ranks_at_a_time: int | None = None,
) -> Registry:
    """Splits a model and fills its meta tensors. Arguments and communication: see `parallelize` and `fill_later`."""
    with fill_later(model, mesh, checkpoint=checkpoint, ranks_at_a_time=ranks_at_a_time) as fill:
        registry = prepare(model, mesh, spec)
        fill(registry)
    return registry


@contextmanager
def fill_later(
    model: nn.Module, mesh: Mesh, *, checkpoint: Place | None = None, ranks_at_a_time: int | None = None
) -> Iterator[Callable[[Registry], None]]:
    """Context manager: finds the source of a model's values before the block splits it; gives a function that fills it.

    Args:
        model: real, or meta in part or in full; PEFT may be around or in it. Its values are those that
            `from_pretrained` would have read, or initial values drawn from rank 0's `torch.initial_seed()`.
        checkpoint: a sharded checkpoint that is loaded instead.
        ranks_at_a_time: how many ranks of a machine fill at the same time; None or not positive: all.

    Raises:
        LoadError: there is no such checkpoint, or weights cannot be read.
        UnsupportedError: the value of a meta tensor is unknown.

    Communicates: two gathers of small objects over all ranks; filling: one per turn, and what `load_checkpoint` does.
    """
    group, inner = mesh.group(), find_model(model)
    join_saves(mesh)
    stored = None if checkpoint is None else open_on_all_ranks(checkpoint, None, mesh)
    reads = stored is None or not holds_all(stored)

    def find() -> tuple[WeightSource | None, dict[str, str]]:
        found = _source_of(inner)
        return found, found.describe() if found is not None and reads else {}

    source = agree_on(group, find, doing="looking for its weights", **SAME_FILES)
    everyone = all_gather_objects((torch.initial_seed(), platform.node()), group)
    nodes, rank = [node for _, node in everyone], 0 if group is None else group.rank()
    most = max(map(nodes.count, nodes))
    at_a_time = ranks_at_a_time if ranks_at_a_time is not None and ranks_at_a_time > 0 else most
    turn = nodes[:rank].count(nodes[rank]) // at_a_time

    def fill(registry: Registry) -> None:
        def work() -> None:
            if source is not None:
                source.fill(inner, registry, seed=everyone[0][0], reads=reads)
                inner.to(registry.mesh.device)  # what was real before

        num_turns = -(-most // at_a_time)
        fill_model(model, stored, lambda: run_serially(work, group, turn=turn, num_turns=num_turns, doing="loading"))
        list(find_parameters(model))  # FSDP2 made parameters anew, which are to know their entries

    yield fill
    if source is not None:  # the block has ended well: else the model may be split another way
        source.close()
    inner.__dict__.pop(SOURCE, None)


def _source_of(model: Any) -> WeightSource | None:
    """Returns the source of the model's meta tensors; None if it has none."""
    own: WeightSource | None = model.__dict__.get(SOURCE)
    if not has_meta(model):
        return None
    parts = [name for name, module in model.named_modules() if module is not model and SOURCE in module.__dict__]
    if parts or not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__}, " + (f"of which {parts[0]} was loaded lazily" if parts else "on the meta device"),
            why="the values of its other tensors are unknown",
            fix="load all of it by from_pretrained of its own class, or nothing of it lazily",
        )
    if own is None:  # built by its constructor
        _, own = build_meta(model.config, type(model), dtype=model.dtype, options={})
        return own.with_adapters_of(model)
    return own.with_adapters_of(model) if has_adapters(model) else own
