"""What the parameters of a split model are: the one place that knows, kept per model.

Parameters are plain local tensors at rest. Whoever hands them out or takes them in (state dicts, gradients,
checkpoints, clipping) looks here for how local and canonical tensors map to each other, and who owns what.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from shardwise.errors import LayoutError
from shardwise.layers.context import SplitContext
from shardwise.layout.placement import Split
from shardwise.layout.tensor import Layout
from shardwise.mesh import Mesh
from shardwise.plan.resolve import SplitPlan

__all__ = [
    "ParameterEntry",
    "Registry",
    "attach_registry",
    "carry_entry",
    "entry_of",
    "is_split",
    "own_memory",
    "registry_of",
    "share_out",
]

_ATTRIBUTE = "_shardwise_registry"
_ENTRY = "_shardwise_entry"


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """One parameter, or persistent buffer, of a split model.

    Attributes:
        fqn: canonical name.
        layout: canonical shape and what each axis does to it.
        gradient: "whole", or "partial" where the ranks' gradients must be summed over tp.
        registry: the model's registry.
    """

    fqn: str
    layout: Layout
    gradient: str
    registry: Registry = field(repr=False, compare=False)

    @functools.cached_property
    def needs_sum(self) -> bool:
        """Whether ranks compute parts of its gradient that must be summed."""
        return self.gradient == "partial" or (self.split is not None and bool(self.split.shared()))

    def shared_parts(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """What this rank holds of a split tensor that others hold too, as views: (tp coords of all holders, view)."""
        if self.split is None:
            return
        coord = self.registry.mesh.coord("tp")
        for interval, holders in self.split.shared():
            if coord in holders:
                for start, stop in self.split.local_of(coord, interval):
                    yield holders, local.narrow(self.split.dim, start, stop - start)

    @functools.cached_property
    def split(self) -> Split | None:
        """How tp splits it, None where every tp rank holds it whole."""
        for step in self.layout.steps:
            if step.axis == "tp" and isinstance(step.placement, Split):
                return step.placement
        return None


@dataclass
class Registry:
    """Everything Shardwise knows of one split model.

    Attributes:
        entries: canonical FQN of every parameter to its entry.
        tied: alias FQN to canonical FQN.
        unsummed: FQNs whose gradient a backward has touched since it was last summed over tp.
        mapped: FQNs of parameters that still lie in private pages of the files they came from.
    """

    mesh: Mesh
    plan: SplitPlan
    context: SplitContext
    entries: dict[str, ParameterEntry] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    unsummed: set[str] = field(default_factory=set)
    mapped: set[str] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, object]) -> Registry:
        # A copied model runs on the same ranks; its parameters start without gradients.
        copied = replace(self, entries={}, unsummed=set(), mapped=set())
        copied.entries.update({fqn: replace(entry, registry=copied) for fqn, entry in self.entries.items()})
        return copied

    def entry(self, fqn: str) -> ParameterEntry:
        """The entry of a parameter by any of its names, tied aliases included."""
        return self.entries[self.tied.get(fqn, fqn)]


def attach_registry(model: nn.Module, registry: Registry) -> None:
    """Makes `registry` the model's, and lets every parameter carry its entry."""
    model.__dict__[_ATTRIBUTE] = registry
    for fqn, parameter in model.named_parameters():
        carry_entry(parameter, registry.entry(fqn))


def own_memory(model: nn.Module) -> None:
    """Moves parameters that lie in mapped files into memory of their own, before something writes to all of them."""
    registry = registry_of(model)
    for fqn, parameter in model.named_parameters():
        if fqn in registry.mapped:
            parameter.data = parameter.data.clone()
    registry.mapped.clear()


def carry_entry(parameter: nn.Parameter, entry: ParameterEntry) -> None:
    """Lets `parameter` carry its entry, and note when a gradient comes in that must be summed."""
    setattr(parameter, _ENTRY, entry)
    if entry.needs_sum and parameter.requires_grad and not parameter.is_meta:
        held = weakref.ref(parameter)

        def note(gradient: Tensor) -> None:
            parameter = held()
            if parameter is not None:
                share_out(parameter, entry)
                entry.registry.unsummed.add(entry.fqn)

        parameter.register_hook(note)


def share_out(parameter: Tensor, entry: ParameterEntry) -> None:
    """Makes a gradient that was summed this rank's share of it again, so that more can be added and summed with it."""
    gradient = parameter.grad
    if gradient is None or not entry.needs_sum or entry.fqn in entry.registry.unsummed:
        return
    with torch.no_grad():
        if entry.gradient == "partial":
            gradient /= entry.registry.context.size
        for holders, part in entry.shared_parts(gradient):
            part.div_(len(holders))
    entry.registry.unsummed.add(entry.fqn)


def registry_of(model: nn.Module) -> Registry:
    """The registry of a model that Shardwise has split, also through wrappers such as PEFT's.

    Raises:
        LayoutError: the model was never given to `shardwise.load` or `shardwise.parallelize`.
    """
    for module in model.modules():
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
    """The entry that a parameter of a split model carries, None for any other tensor."""
    return getattr(parameter, _ENTRY, None)
