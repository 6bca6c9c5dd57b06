"""Registry of a split model's parameters: the one place that knows their layouts and owners, kept per model.

Between steps, parameters are plain local tensors. Code that exports or imports them (state dicts, gradients,
checkpoints, clipping) looks up here how local and canonical tensors correspond, and who owns what.

# [Note: found by identity]
A parameter is identified by the module that owns it and its name there, and carries its entry as an attribute. Wrappers
(PEFT, Lightning) nest modules and so change parameter names. FSDP2 and `load_state_dict(assign=True)` replace the
parameters. The owning module stays. Owners of parameters on other pipeline stages stay too and know the entries: every
rank sees the full model with the same names in the same order.
"""

import copy
import enum
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.comm.collectives import stored_dtensor
from shardwise.errors import LayoutError
from shardwise.mesh import Mesh
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import FsdpPolicy, Precision
from shardwise.plan.structure import fqn_of
from shardwise.runtime.context import SplitContext
from shardwise.runtime.fsdp_internals import UnusedParameters, drop_unreduced, free
from shardwise.runtime.reading import Casting
from shardwise.sharding.boxes import slices
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Chunk, OnCoords, Split
from shardwise.stages.model import Stages

_ATTRIBUTE = "_shardwise_registry"
_ENTRY = "_shardwise_entry"
_ENTRIES = "_shardwise_entries"
_WALK = "_shardwise_walk"


class DataHandling(enum.StrEnum):
    """How a parameter is stored and its gradient reduced along the data axes; the values are those of plans."""

    NONE = ""
    FSDP = "managed"  # FSDP2 holds it as a `DTensor` over them, and reduces its gradient
    ALL_REDUCE = "reduced"  # every data rank holds all of it, and the gradient phase sums its gradient


def axes_of(gradient: str) -> frozenset[str]:
    """Returns the axes over which a gradient must be summed: tp if the plan calls it "partial", none if "full"."""
    return frozenset({"tp"}) if gradient == "partial" else frozenset()


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """One parameter, or persistent buffer, of a split model.

    Attributes:
        layout: canonical shape, and the placement along each axis.
        partial_over: axes along which the ranks' gradients are partial and must be summed.
    """

    fqn: str
    layout: Layout
    partial_over: frozenset[str] = frozenset()
    data: DataHandling = DataHandling.NONE
    registry: "Registry" = field(repr=False, compare=False)

    @functools.cached_property
    def needs_sum(self) -> bool:
        """Whether the gradient phase sums its gradient over any axis."""
        is_reduced = self.data is DataHandling.ALL_REDUCE
        return bool(self.partial_over or self.holders) or is_reduced or len(self.stage_coords) > 1

    @functools.cached_property
    def stage_coords(self) -> tuple[int, ...]:
        """The pp coords that hold it; empty without a pipeline."""
        held = self.layout.placement("pp")
        return held.coords if isinstance(held, OnCoords) else ()

    @functools.cached_property
    def is_held(self) -> bool:
        """Whether this rank's stages hold it."""
        return self.layout.is_held(self.registry.mesh.coords)

    def shared_parts(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yields the parts of this rank's tensor that other tp ranks hold too: (tp coords of all holders, view)."""
        for holders, start, length in self._shared_spans:
            assert self.split is not None
            yield holders, local.narrow(self.split.dim, start, length)

    @functools.cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of tp coords that hold the same elements of a split tensor; empty if no elements are shared."""
        return tuple(sorted({holders for _, holders in self.split.shared()})) if self.split is not None else ()

    @functools.cached_property
    def owned_slices(self) -> tuple[tuple[slice, ...] | None, ...]:
        """The parts of this rank's tensor that it owns; None: all. Ranks together own every canonical element once."""
        found = [slices(piece.local) for piece in self.layout.owned(self.registry.mesh.coords)]
        return tuple(None if [each.stop - each.start for each in own] == [*self.local_shape] else own for own in found)

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return self.layout.local_shape(self.registry.mesh.coords)

    @functools.cached_property
    def _shared_spans(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        if self.split is None:
            return ()
        mesh, dim, chunk = self.registry.mesh, self.split.dim, self.chunk
        coord = mesh.coord("tp")
        first, last = 0, self.split.local_sizes[coord]
        if chunk is not None and chunk.dim == dim:
            first, last = chunk.interval(mesh.coord("fsdp"), size=last, parts=mesh.size("fsdp"))
        found = []
        for interval, holders in self.split.shared():
            for start, stop in self.split.local_of(coord, interval):
                begin, end = max(start, first), max(start, first, min(stop, last))
                found.append((holders, min(begin - first, last - first), end - begin))
        return tuple(found)

    @functools.cached_property
    def split(self) -> Split | None:
        """Split over tp; None if it is replicated over tp."""
        placement = self.layout.placement("tp")
        return placement if isinstance(placement, Split) else None

    @functools.cached_property
    def chunk(self) -> Chunk | None:
        """Chunk of this tp rank's part over fsdp; None if it is replicated over fsdp."""
        placement = self.layout.placement("fsdp")
        return placement if isinstance(placement, Chunk) else None

    @functools.cached_property
    def tensor_layout(self) -> Layout:
        """Layout over tp alone: the layout of the parameter while its FSDP unit runs."""
        return Layout(self.layout.shape, tuple(step for step in self.layout.steps if step.axes == ("tp",)))

    def wrap(self, local: Tensor) -> Tensor:
        """Converts this rank's part to the model's parameter: a `DTensor` over the data axes if FSDP2 shards it."""
        mesh = self.registry.mesh
        data_mesh = mesh.data_mesh
        if self.data is not DataHandling.FSDP or data_mesh is None:
            return local
        shape = self.tensor_layout.local_shape(mesh.coords)
        placements: list[Replicate | Shard] = [Replicate()] * data_mesh.ndim
        if self.chunk is not None:
            placements[-1] = Shard(self.chunk.dim)
        return stored_dtensor(local, data_mesh, placements, shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterEntry":
        registry = copy.deepcopy(self.registry, memo)  # with all of its entries, this one perhaps among them
        return memo.get(id(self)) or replace(self, registry=registry)


@dataclass(frozen=True)
class Source:
    """Where the weights of a model came from, and which parameters have changed since.

    Attributes:
        name: the directory or hub id, as transformers keeps it (`name_or_path`); "" if unknown.
        digest: digest of the files that Shardwise has read; "" if it has read none.
        states: for every parameter by name, a value that changes when the parameter is written to. Optimizers' steps
            remove the names of what they update.
    """

    name: str = ""
    digest: str = ""
    states: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class Registry:
    """All facts about one split model. The state of a forward and of the gradients is kept elsewhere.

    Attributes:
        entries: canonical FQN of every parameter, to its entry.
        policy: options of the data axes.
        precision: dtypes; None if every tensor keeps its dtype.
        frozen: FQNs of parameters that were frozen when the model was split and are stored in the dtype of computation,
            to that dtype.
        data_root: module with FSDP2's root state; None if FSDP2 shards nothing.
        stage_roots: FSDP2 root of each pipeline stage, if FSDP2 shards anything.
        casting: casts parameters to the dtype of computation, if FSDP2 does not.
        model: weak reference to the split model, once attached.
        local_state: whether `state_dict` and optimizer states are this rank's parts, as for models split by hand.
        reads_names: whether only the names of the model's state are being read, so that parts are allowed.
        uses: parameters that backward has used, of the FSDP2 units that ranks may use differently.
        idle_stages: pp coords without trained parameters, as of the last step.
        source: source of the weights; see `shardwise.parameters.registry`.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> "Registry":
        # A copied model runs on the same ranks.
        source = replace(self.source, states=dict(self.source.states))  # steps of the copy write to the copy alone
        copied = memo[id(self)] = replace(self, entries={}, source=source)
        model = self.model()
        if id(model) in memo:
            copied.model = weakref.ref(memo[id(model)])
        copied.entries.update({fqn: copy.deepcopy(entry, memo) for fqn, entry in self.entries.items()})
        own = (self.stages, self.stage_roots, self.casting)
        copied.stages, copied.stage_roots, copied.casting = copy.deepcopy(own, memo)
        return copied

    @functools.cached_property
    def needs_sums(self) -> bool:
        """Whether the gradient phase has to sum any gradient."""
        return any(entry.needs_sum for entry in self.entries.values())

    def device_of(self, fqn: str) -> torch.device:
        """Returns the device that stores a parameter or buffer: the mesh's device, or the CPU if it is offloaded."""
        entry = self.entries.get(self.tied.get(fqn, fqn))
        offloaded = self.policy.cpu_offload and entry is not None and entry.data is DataHandling.FSDP
        return torch.device("cpu") if offloaded else self.mesh.device

    @property
    def divide_factor(self) -> float:
        """Divisor of gradients in the reduction over the data axes."""
        return self.policy.gradient_divide_factor or float(self.mesh.data_size)

    def holds(self, fqn: str) -> bool:
        """Returns whether this rank's stages hold a parameter, by any of its names. Every rank holds all buffers."""
        entry = self.entries.get(self.tied.get(fqn, fqn))
        return entry is None or entry.is_held

    def names_of(self, fqn: str) -> tuple[str, ...]:
        """Returns the canonical FQN `fqn` and its aliases."""
        return (fqn, *(alias for alias, canonical in self.tied.items() if canonical == fqn))

    def entry(self, fqn: str) -> ParameterEntry:
        """Returns the entry of a parameter by any of its names, including tied aliases."""
        return self.entries[self.tied.get(fqn, fqn)]


def note_parameters(model: nn.Module, registry: Registry) -> None:
    """Creates an entry for every parameter of the unsplit model, and attaches it to the owning module."""
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
    """Attaches `registry` to the model, and the entries to its parameters."""
    model.__dict__[_ATTRIBUTE] = registry
    registry.model = weakref.ref(model)
    for _ in find_parameters(model):
        pass  # it marks them


def attach_entry(owner: nn.Module, name: str, entry: ParameterEntry) -> None:
    """Attaches `entry` to the owner's parameter `name`, whichever tensor that becomes."""
    owner.__dict__.setdefault(_ENTRIES, {})[name] = entry
    parameter = owner._parameters[name]
    assert parameter is not None
    mark(parameter, entry)


def entries_of(owner: nn.Module) -> Mapping[str, ParameterEntry]:
    """Returns entries of the parameters that a module owns, by their own names, with parameters of other stages."""
    entries: Mapping[str, ParameterEntry] = owner.__dict__.get(_ENTRIES, {})
    return entries


def mark(value: Tensor, entry: ParameterEntry) -> None:
    """Attaches `entry` to `value`, so that `entry_of(value)` returns it."""
    setattr(value, _ENTRY, entry)


@dataclass(frozen=True)
class ModuleWalk:
    """Cached list of a model's modules, valid until a module or a parameter name is added, removed or replaced.

    Attributes:
        modules: each module once.
        children: children of each module when it was walked.
        names: parameter names of each module when it was walked.
        places: every parameter's name, module, and name there, including parameters of other stages.
    """

    modules: list[nn.Module]
    children: list[list[nn.Module | None]]
    names: list[list[str]]
    places: list[tuple[str, nn.Module, str]]

    @property
    def is_current(self) -> bool:
        """Whether the modules have not changed since the walk."""
        return all(
            list(module._modules.values()) == children and list(module._parameters) == names
            for module, children, names in zip(self.modules, self.children, self.names, strict=True)
        )


def walk_modules(root: nn.Module) -> ModuleWalk:
    """Returns the cached walk through the modules in `root`; walks again if they have changed."""
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
    """Yields every parameter that this rank holds once: (name, parameter, entry). See [Note: found by identity].

    The name is the first that `model` (split, or a wrapper of a split model) gives it on any rank. The entry is None
    for a parameter that was added later.
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
    """Builds the error for tied parameters that have become separate tensors."""
    return LayoutError(
        f"{name} and {first} were one parameter when the model was split, and are two now",
        why="what is known of the one, where its parts are and how its gradient is summed, was found for both together",
        fix="untie them before shardwise.parallelize splits the model",
    )


def named_entries(model: nn.Module) -> dict[str, ParameterEntry]:
    """Returns entries by all names in `model`, also tied aliases and other stages' names; equal on every rank."""
    return {
        fqn_of(name, own): entry
        for name, module in model.named_modules(remove_duplicate=False)
        for own, entry in entries_of(module).items()
    }


def canonical_entries(model: nn.Module) -> dict[str, ParameterEntry]:
    """Returns the entries by their first names, as in `find_parameters`."""
    first: dict[int, tuple[str, ParameterEntry]] = {}
    for name, entry in named_entries(model).items():
        first.setdefault(id(entry), (name, entry))
    return dict(first.values())


class LocalGradient:
    """Base class of sharded gradients; see `shardwise.parameters.local_gradient`."""


def local_part(value: Tensor) -> Tensor:
    """Returns this rank's part of a parameter or gradient, as a plain tensor that shares its memory."""
    if isinstance(value, DTensor):
        return value._local_tensor.detach()
    if isinstance(value, LocalGradient):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    return value


def registry_of(model: nn.Module) -> Registry:
    """Returns the registry of a model that Shardwise has split, also through wrappers such as PEFT's."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if _ATTRIBUTE in module.__dict__:
            return module.__dict__[_ATTRIBUTE]
    raise LayoutError(
        f"{type(model).__name__} is not a model that Shardwise has split",
        fix="pass it through shardwise.parallelize(model, mesh) first, or load it with shardwise.load",
    )


def is_split(model: nn.Module) -> bool:
    """Returns whether Shardwise has split the model."""
    return any(_ATTRIBUTE in module.__dict__ for module in model.modules())


def entry_of(parameter: Tensor) -> ParameterEntry | None:
    """Returns the entry of a split model's parameter or of a sharded gradient; None for other tensors."""
    return getattr(parameter, _ENTRY, None)


def reshard(model: nn.Module) -> None:
    """Makes FSDP2 free parameters that a forward without backward has left gathered."""
    for root in (model, *registry_of(model).stage_roots.values()):
        for module in walk_modules(root).modules:
            if isinstance(module, FSDPModule):
                free(module)


def forget_unreduced(model: nn.Module) -> None:
    """Drops gradients that FSDP2 keeps for a later backward to reduce. They are in no `.grad`."""
    for root in (model, *registry_of(model).stage_roots.values()):
        drop_unreduced(root)


def note_source(model: nn.Module, registry: Registry, *, digest: str = "", drawn: Collection[str] = ()) -> None:
    """Records that the parameters of a split model have the values of their source.

    Args:
        drawn: names of parameters that have random values instead.
    """
    states = {
        entry.fqn: _state(parameter)
        for _, parameter, entry in find_parameters(model)
        if entry is not None and not parameter.is_meta and entry.fqn not in drawn
    }
    registry.source = Source(str(getattr(model, "name_or_path", "") or ""), digest, states)


def unchanged_names(model: nn.Module, registry: Registry) -> set[str]:
    """Returns the names of this rank's parameters that were not written to since they had their source's values."""
    source = registry.source
    has_source = bool(source.name or source.digest)
    return {
        entry.fqn
        for _, parameter, entry in (find_parameters(model) if has_source else ())
        if entry is not None and source.states.get(entry.fqn) == _state(parameter)
    }


def _state(parameter: Tensor) -> tuple[int, ...]:
    local = local_part(parameter)
    return local.data_ptr(), local._version, parameter._version
