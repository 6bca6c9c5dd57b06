"""What the parameters of a split model are: the one place that knows, kept per model.

Parameters are plain local tensors at rest. Whoever hands them out or takes them in (state dicts, gradients,
checkpoints, clipping) looks here for how local and canonical tensors map to each other, and who owns what.

# [Note: found by identity]
A parameter is known by the module that owns it and its name there, and carries what is known as an attribute. Wrappers
(PEFT, Lightning) put modules elsewhere and so change the names a model gives its parameters, FSDP2 and
`load_state_dict(assign=True)` replace the parameters; the module that owns them stays. So do the owners of what other
stages of a pipeline hold, and they know its entries: every rank sees the full model by the same names, in one order.
"""

from __future__ import annotations

import copy
import enum
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.comm.collectives import stored_dtensor
from shardwise.errors import LayoutError
from shardwise.mesh import Mesh
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import FsdpPolicy, Precision
from shardwise.plan.structure import fqn_of
from shardwise.runtime.casting import Casting
from shardwise.runtime.context import SplitContext
from shardwise.runtime.fsdp_internals import UnusedParameters
from shardwise.sharding.boxes import slices
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Chunk, OnCoords, Split
from shardwise.stages.model import Stages

__all__ = [
    "DataHandling",
    "LocalGradient",
    "ParameterEntry",
    "Registry",
    "Source",
    "attach_entry",
    "attach_registry",
    "axes_of",
    "canonical_entries",
    "entries_of",
    "entry_of",
    "find_parameters",
    "is_split",
    "local_part",
    "mark",
    "named_entries",
    "note_parameters",
    "registry_of",
    "untied",
    "walk_modules",
]

_ATTRIBUTE = "_shardwise_registry"
_ENTRY = "_shardwise_entry"
_ENTRIES = "_shardwise_entries"
_WALK = "_shardwise_walk"


class DataHandling(enum.StrEnum):
    """What is done with a parameter along the data axes; the values are those of plans."""

    NONE = ""
    FSDP = "managed"
    """FSDP2 holds it as a `DTensor` over them, and reduces its gradient."""
    ALL_REDUCE = "reduced"
    """Every data rank holds all of it, and the gradient phase sums its gradient."""


def axes_of(gradient: str) -> frozenset[str]:
    """The axes over which a gradient that a plan calls "full" or "partial" must be summed."""
    return frozenset({"tp"}) if gradient == "partial" else frozenset()


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """One parameter, or persistent buffer, of a split model.

    Attributes:
        fqn: canonical name.
        layout: canonical shape and what each axis does to it.
        partial_over: the axes along which ranks compute terms of the gradient, which must be summed.
        data: what is done along the data axes.
        registry: the model's registry.
    """

    fqn: str
    layout: Layout
    partial_over: frozenset[str] = frozenset()
    data: DataHandling = DataHandling.NONE
    registry: Registry = field(repr=False, compare=False)

    @functools.cached_property
    def needs_sum(self) -> bool:
        """Whether the gradient phase sums its gradient, over any axis."""
        is_reduced = self.data is DataHandling.ALL_REDUCE
        return bool(self.partial_over or self.holders) or is_reduced or len(self.stage_coords) > 1

    @functools.cached_property
    def stage_coords(self) -> tuple[int, ...]:
        """The coords on pp that hold it; none without a pipeline."""
        held = self.layout.placement("pp")
        return held.coords if isinstance(held, OnCoords) else ()

    @functools.cached_property
    def is_held(self) -> bool:
        """Whether this rank's stages hold it."""
        return self.layout.is_held(self.registry.mesh.coords)

    def shared_parts(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """What this rank holds of a split tensor that others hold too, as views: (tp coords of all holders, view)."""
        for holders, start, length in self._shared_spans:
            assert self.split is not None
            yield holders, local.narrow(self.split.dim, start, length)

    @functools.cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of tp coords that hold the same elements of a split tensor; none where nobody shares any."""
        return tuple(sorted({holders for _, holders in self.split.shared()})) if self.split is not None else ()

    @functools.cached_property
    def owned_slices(self) -> tuple[tuple[slice, ...] | None, ...]:
        """The parts of this rank's tensor that it owns, None for all of it: over all ranks, every canonical element
        once.
        """
        found = [slices(piece.local) for piece in self.layout.owned(self.registry.mesh.coords)]
        return tuple(None if [each.stop - each.start for each in own] == [*self.local_shape] else own for own in found)

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.layout.local_shape(self.registry.mesh.coords)

    @functools.cached_property
    def _shared_spans(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        if self.split is None:
            return ()
        mesh, dim, chunk = self.registry.mesh, self.split.dim, self.chunk
        first, last = 0, self.split.local_sizes[mesh.coord("tp")]
        if chunk is not None and chunk.dim == dim:
            first, last = chunk.interval(mesh.coord("fsdp"), size=last, parts=mesh.size("fsdp"))
        found = []
        for interval, holders in self.split.shared():
            for start, stop in self.split.local_of(mesh.coord("tp"), interval):
                begin, end = max(start, first), max(start, first, min(stop, last))
                found.append((holders, min(begin - first, last - first), end - begin))
        return tuple(found)

    @functools.cached_property
    def split(self) -> Split | None:
        """How tp splits it, None where it is replicated over tp."""
        placement = self.layout.placement("tp")
        return placement if isinstance(placement, Split) else None

    @functools.cached_property
    def chunk(self) -> Chunk | None:
        """How fsdp splits this tp rank's part, None where it is replicated over fsdp."""
        placement = self.layout.placement("fsdp")
        return placement if isinstance(placement, Chunk) else None

    @functools.cached_property
    def tensor_layout(self) -> Layout:
        """What tp alone does to it: the layout of the parameter while its unit runs."""
        return Layout(self.layout.shape, tuple(step for step in self.layout.steps if step.axis == "tp"))

    def wrap(self, local: Tensor) -> Tensor:
        """What this rank holds, as the model's parameter holds it: a `DTensor` over the data axes where FSDP2 does."""
        mesh = self.registry.mesh
        data_mesh = mesh.data_mesh
        if self.data is not DataHandling.FSDP or data_mesh is None:
            return local
        shape = self.tensor_layout.local_shape(mesh.coords)
        placements: list[Replicate | Shard] = [Replicate()] * data_mesh.ndim
        if self.chunk is not None:
            placements[-1] = Shard(self.chunk.dim)
        return stored_dtensor(local, data_mesh, placements, shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterEntry:
        registry = copy.deepcopy(self.registry, memo)  # with all of its entries, this one perhaps among them
        return memo.get(id(self)) or replace(self, registry=registry)


@dataclass(frozen=True)
class Source:
    """The source of a model's weights.

    Attributes:
        name: the directory or hub id, as transformers keeps it (`name_or_path`); empty where it is not known.
        digest: of the files that Shardwise has read; empty where it has read none.
        states: of every parameter by name, what changes when its values do.
    """

    name: str = ""
    digest: str = ""
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class Registry:
    """Everything Shardwise knows of one split model. The last four change after the split; a forward's state and the
    gradients' are elsewhere.

    Attributes:
        entries: canonical FQN of every parameter to its entry.
        tied: alias FQN to canonical FQN.
        policy: what was chosen about the data axes.
        precision: the dtypes that were chosen, None where everything keeps its own.
        frozen: FQNs of parameters that were not trained when the model was split and are kept in the dtype of
            computation, with that.
        data_root: the module whose FSDP2 state is the root of all others; None where nothing is managed.
        stage_roots: what FSDP2 gathers and reduces together for each stage of a pipeline, where it manages anything.
        casting: what reads parameters in the dtype of computation, where FSDP2 does not cast them.
        model: the split model, once it is attached.
        local_state: whether `state_dict` and optimizers' states are this rank's parts, as who split it by hand expects.
        stages: what runs this rank's stages of a pipeline; None without one.
        reads_names: whether the names of the model's state are being read, of parts too.
        uses: what backward has used of the units of FSDP2 that ranks may use differently.
        idle_stages: the coords of pp that have no parameter to train, as the last gradient phase has found.
        source: where the weights came from; see `shardwise.parameters.source`.
    """

    mesh: Mesh
    plan: SplitPlan
    context: SplitContext
    entries: dict[str, ParameterEntry] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    policy: FsdpPolicy = field(default_factory=FsdpPolicy)
    precision: Precision | None = None
    frozen: dict[str, torch.dtype] = field(default_factory=dict)
    data_root: nn.Module | None = None
    stage_roots: dict[int, nn.Module] = field(default_factory=dict)
    casting: Casting | None = None
    model: Callable[[], nn.Module | None] = lambda: None
    local_state: bool = False
    stages: Stages | None = None
    reads_names: bool = False
    uses: UnusedParameters = field(default_factory=UnusedParameters)
    idle_stages: tuple[int, ...] = ()
    source: Source = field(default_factory=Source)

    def __deepcopy__(self, memo: dict[int, Any]) -> Registry:
        # A copied model runs on the same ranks.
        copied = memo[id(self)] = replace(self, entries={})
        model = self.model()
        if id(model) in memo:
            copied.model = weakref.ref(memo[id(model)])
        copied.entries.update({fqn: copy.deepcopy(entry, memo) for fqn, entry in self.entries.items()})
        own = (self.stages, self.stage_roots, self.casting)
        copied.stages, copied.stage_roots, copied.casting = copy.deepcopy(own, memo)
        return copied

    @functools.cached_property
    def needs_sums(self) -> bool:
        """Whether any gradient needs a sum of ours: known once the model is split."""
        return any(entry.needs_sum for entry in self.entries.values())

    def device_of(self, fqn: str) -> torch.device:
        """Where a parameter or buffer is stored at rest: the mesh's device, or host memory for what is offloaded."""
        entry = self.entries.get(self.tied.get(fqn, fqn))
        offloaded = self.policy.cpu_offload and entry is not None and entry.data is DataHandling.FSDP
        return torch.device("cpu") if offloaded else self.mesh.device

    @property
    def divide_factor(self) -> float:
        """What gradients are divided by when they are reduced over the data axes."""
        return self.policy.gradient_divide_factor or float(self.mesh.data_size)

    def holds(self, fqn: str) -> bool:
        """Whether this rank's stages hold a parameter, by any of its names; every rank holds all buffers."""
        entry = self.entries.get(self.tied.get(fqn, fqn))
        return entry is None or entry.is_held

    def names_of(self, fqn: str) -> tuple[str, ...]:
        """The canonical FQN `fqn` and its aliases."""
        return (fqn, *(alias for alias, canonical in self.tied.items() if canonical == fqn))

    def entry(self, fqn: str) -> ParameterEntry:
        """The entry of a parameter by any of its names, tied aliases included."""
        return self.entries[self.tied.get(fqn, fqn)]


def note_parameters(model: nn.Module, registry: Registry) -> None:
    """Gives every parameter of the unsplit model an entry, and lets its owner know it."""
    for fqn, planned in registry.plan.parameters.items():
        registry.entries[fqn] = ParameterEntry(
            fqn=fqn,
            layout=planned.layout,
            partial_over=axes_of(planned.gradient),
            data=DataHandling(planned.data),
            registry=registry,
        )
    for name, module in model.named_modules():
        own = (each for each, parameter in module._parameters.items() if parameter is not None)
        entries = module.__dict__.setdefault(_ENTRIES, {})
        entries |= {each: registry.entry(fqn_of(name, each)) for each in own}


def attach_registry(model: nn.Module, registry: Registry) -> None:
    """Makes `registry` the model's, and lets every parameter know its entry."""
    model.__dict__[_ATTRIBUTE] = registry
    registry.model = weakref.ref(model)
    for _ in find_parameters(model):
        pass  # it marks them


def attach_entry(owner: nn.Module, name: str, entry: ParameterEntry) -> None:
    """Makes `entry` that of the owner's parameter `name`, whichever tensor that will be."""
    owner.__dict__.setdefault(_ENTRIES, {})[name] = entry
    parameter = owner._parameters[name]
    assert parameter is not None
    mark(parameter, entry)


def entries_of(owner: nn.Module) -> Mapping[str, ParameterEntry]:
    """The entries of the parameters that a module owns by their own names, also those that other stages hold."""
    entries: Mapping[str, ParameterEntry] = owner.__dict__.get(_ENTRIES, {})
    return entries


def mark(value: Tensor, entry: ParameterEntry) -> None:
    """Makes `entry_of(value)` give `entry`."""
    setattr(value, _ENTRY, entry)


@dataclass(frozen=True)
class ModuleWalk:
    """The modules in a model, kept until one is put in, taken out or replaced, or has other names of parameters.

    Attributes:
        modules: each once.
        children: of each module, as they were.
        names: of each module's parameters, as they were.
        places: every parameter's name, module, and name there, also of parameters that other stages hold.
    """

    modules: list[nn.Module]
    children: list[list[nn.Module | None]]
    names: list[list[str]]
    places: list[tuple[str, nn.Module, str]]

    @property
    def is_current(self) -> bool:
        """Whether the modules are those that were walked."""
        return all(
            list(module._modules.values()) == children and list(module._parameters) == names
            for module, children, names in zip(self.modules, self.children, self.names, strict=True)
        )


def walk_modules(root: nn.Module) -> ModuleWalk:
    """The walk through the modules in `root`, a new one where they have changed."""
    walk: ModuleWalk | None = root.__dict__.get(_WALK)
    if walk is None or not walk.is_current:
        named = list(root.named_modules())
        modules = [module for _, module in named]
        root.__dict__[_WALK] = walk = ModuleWalk(
            modules=modules,
            children=[list(module._modules.values()) for module in modules],
            names=[list(module._parameters) for module in modules],
            places=[
                (fqn_of(name, own), module, own)
                for name, module in named
                for own in dict.fromkeys((*entries_of(module), *module._parameters))
            ],
        )
    return walk


def find_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterEntry | None]]:
    """Every parameter that this rank holds, once: (name, parameter, entry), by the first name that `model`, split or a
    module around one, gives it on any rank; the entry is None for a parameter that came in later. See [Note: found by
    identity].

    Raises:
        LayoutError: tied parameters are two now, or another tensor was assigned to a parameter's `data`.
    """
    names: dict[int, str] = {}
    held: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    for alias, module, own in walk_modules(model).places:
        parameter, entry = module._parameters.get(own), entries_of(module).get(own)
        fqn = alias if entry is None else names.setdefault(id(entry), alias)
        if parameter is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if entry is not None:
            if held.setdefault(id(entry), parameter) is not parameter:
                raise untied(alias, fqn)
            if entry_of(parameter) is not entry:
                mark(parameter, entry)
            if entry.split and entry.data is not DataHandling.FSDP and parameter.shape != entry.local_shape:
                raise LayoutError(
                    f"{fqn} has shape {list(parameter.shape)}, and this rank's part of it is {list(entry.local_shape)}",
                    why="another tensor was assigned to the parameter's data after the split",
                    fix="assign what is made of p (p.data * 0.5), or load full tensors by load_state_dict",
                )
        yield fqn, parameter, entry


def untied(name: str, first: str) -> LayoutError:
    """The error of tied parameters that are two now."""
    return LayoutError(
        f"{name} and {first} were one parameter when the model was split, and are two now",
        why="what is known of the one, where its parts are and how its gradient is summed, was found for both together",
        fix="untie them before shardwise.parallelize splits the model",
    )


def named_entries(model: nn.Module) -> dict[str, ParameterEntry]:
    """The entries by all names that `model`, split or a module around one, gives them, tied aliases included, also of
    parameters that other stages hold: the same on every rank.
    """
    return {
        fqn_of(name, own): entry
        for name, module in model.named_modules(remove_duplicate=False)
        for own, entry in entries_of(module).items()
    }


def canonical_entries(model: nn.Module) -> dict[str, ParameterEntry]:
    """The entries by their first names alone, as `find_parameters` gives them."""
    first: dict[int, tuple[str, ParameterEntry]] = {}
    for name, entry in named_entries(model).items():
        first.setdefault(id(entry), (name, entry))
    return dict(first.values())


class LocalGradient:
    """Base of gradients that answer for the full one; see `shardwise.parameters.local_gradient`."""


def local_part(value: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank holds, as a plain tensor that shares its memory."""
    if isinstance(value, DTensor):
        return value._local_tensor.detach()
    if isinstance(value, LocalGradient):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    return value


def registry_of(model: nn.Module) -> Registry:
    """The registry of a model that Shardwise has split, also through wrappers such as PEFT's.

    Raises:
        LayoutError: the model was never given to `shardwise.load` or `shardwise.parallelize`.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if _ATTRIBUTE in module.__dict__:
            return module.__dict__[_ATTRIBUTE]
    raise LayoutError(
        f"{type(model).__name__} is not a model that Shardwise has split",
        fix="pass it through shardwise.parallelize(model, mesh) first, or load it with shardwise.load",
    )


def is_split(model: nn.Module) -> bool:
    """Whether Shardwise has split the model already."""
    return any(_ATTRIBUTE in module.__dict__ for module in model.modules())


def entry_of(parameter: Tensor) -> ParameterEntry | None:
    """The entry that a parameter of a split model carries, or a gradient that knows it; None for any other tensor."""
    return getattr(parameter, _ENTRY, None)
