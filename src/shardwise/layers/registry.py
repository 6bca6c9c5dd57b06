"""What the parameters of a split model are: the one place that knows, kept per model.

Parameters are plain local tensors at rest. Whoever hands them out or takes them in (state dicts, gradients,
checkpoints, clipping) looks here for how local and canonical tensors map to each other, and who owns what.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.errors import LayoutError
from shardwise.layers.context import SplitContext
from shardwise.layout.placement import Chunk, Split
from shardwise.layout.tensor import Layout
from shardwise.mesh import Mesh
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import FsdpPolicy, Precision

__all__ = [
    "LossScale",
    "ParameterEntry",
    "Registry",
    "attach_registry",
    "carry_entry",
    "entry_of",
    "expect_before_forwards",
    "expect_gradients",
    "is_split",
    "local_part",
    "own_memory",
    "registry_of",
    "reshard",
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
        data: "" where nothing is to be done along the data axes, "managed" where FSDP2 holds the parameter as a
            `DTensor` over them, "reduced" where it lies whole on each of them and we sum its gradient.
        registry: the model's registry.
    """

    fqn: str
    layout: Layout
    gradient: str
    data: str = ""
    registry: Registry = field(repr=False, compare=False)

    @functools.cached_property
    def needs_sum(self) -> bool:
        """Whether ranks compute parts of its gradient that we must sum, over tp or over the data axes."""
        return self.needs_tensor_sum or self.data == "reduced"

    @functools.cached_property
    def needs_tensor_sum(self) -> bool:
        """Whether tp ranks compute parts of its gradient that must be summed."""
        return self.gradient == "partial" or (self.split is not None and bool(self.split.shared()))

    def shared_parts(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """What this rank holds of a split tensor that others hold too, as views: (tp coords of all holders, view)."""
        if self.split is None:
            return
        mesh, dim = self.registry.mesh, self.split.dim
        first, last = 0, self.split.local_size_of(mesh.coord("tp"))
        chunk = self.chunk
        if chunk is not None and chunk.dim == dim:
            first, last = chunk.interval(mesh.coord("fsdp"), size=last, parts=mesh.size("fsdp"))
        for interval, holders in self.split.shared():
            if mesh.coord("tp") in holders:
                for start, stop in self.split.local_of(mesh.coord("tp"), interval):
                    begin, end = max(start, first), max(start, first, min(stop, last))
                    yield holders, local.narrow(dim, min(begin - first, local.shape[dim]), end - begin)

    @functools.cached_property
    def split(self) -> Split | None:
        """How tp splits it, None where every tp rank holds it whole."""
        for step in self.layout.steps:
            if step.axis == "tp" and isinstance(step.placement, Split):
                return step.placement
        return None

    @functools.cached_property
    def chunk(self) -> Chunk | None:
        """How fsdp cuts this tp rank's part, None where it lies whole on every fsdp rank."""
        for step in self.layout.steps:
            if step.axis == "fsdp" and isinstance(step.placement, Chunk):
                return step.placement
        return None

    @functools.cached_property
    def tensor_layout(self) -> Layout:
        """What tp alone does to it: the layout of the parameter while its unit runs."""
        return Layout(self.layout.shape, tuple(step for step in self.layout.steps if step.axis == "tp"))

    def wrap(self, local: Tensor) -> Tensor:
        """What this rank holds, as the model's parameter holds it: a `DTensor` over the data axes where FSDP2 does."""
        mesh = self.registry.mesh
        data_mesh = mesh.data_mesh
        if self.data != "managed" or data_mesh is None:
            return local
        shape = self.tensor_layout.local_shape(mesh.coords)
        placements: list[Replicate | Shard] = [Replicate()] * data_mesh.ndim
        if self.chunk is not None:
            placements[-1] = Shard(self.chunk.dim)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, data_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


@dataclass
class LossScale:
    """What float16 losses are multiplied by, so that small gradients do not vanish: halved where they overflow, doubled
    behind `interval` steps in which they did not (as torch's GradScaler does).
    """

    value: float = 2.0**16
    interval: int = 2000
    good_steps: int = 0

    def update(self, *, overflowed: bool) -> None:
        """Notes how a step went."""
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value /= 2
        elif self.good_steps == self.interval:
            self.value, self.good_steps = self.value * 2, 0


@dataclass
class Registry:
    """Everything Shardwise knows of one split model.

    Attributes:
        entries: canonical FQN of every parameter to its entry.
        tied: alias FQN to canonical FQN.
        unsummed: FQNs whose gradient a backward has touched since it was last summed over tp.
        policy: what was chosen about the data axes.
        precision: the dtypes that were chosen, None where everything keeps its own.
        loss_scale: of float16; None otherwise.
        norm: of the gradients as they are now, where it has been computed.
        data_root: the module whose FSDP2 state rules all others; None where nothing is managed.
        mapped: FQNs of parameters that still lie in private pages of the files they came from.
    """

    mesh: Mesh
    plan: SplitPlan
    context: SplitContext
    entries: dict[str, ParameterEntry] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    unsummed: set[str] = field(default_factory=set)
    policy: FsdpPolicy = field(default_factory=FsdpPolicy)
    precision: Precision | None = None
    loss_scale: LossScale | None = None
    norm: Tensor | None = None
    data_root: nn.Module | None = None
    mapped: set[str] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, object]) -> Registry:
        # A copied model runs on the same ranks; its parameters start without gradients.
        copied = replace(self, entries={}, unsummed=set(), mapped=set())
        copied.entries.update({fqn: replace(entry, registry=copied) for fqn, entry in self.entries.items()})
        return copied

    @functools.cached_property
    def needs_sums(self) -> bool:
        """Whether any gradient waits for a sum of ours: known once the model is split."""
        return any(entry.needs_sum for entry in self.entries.values())

    def home(self, fqn: str) -> torch.device:
        """Where a parameter or buffer lies at rest: the mesh's device, or host memory for what is offloaded."""
        entry = self.entries.get(self.tied.get(fqn, fqn))
        offloaded = self.policy.cpu_offload and entry is not None and entry.data == "managed"
        return torch.device("cpu") if offloaded else self.mesh.device

    @property
    def divide_factor(self) -> float:
        """What gradients are divided by when they are reduced over the data axes."""
        return self.policy.gradient_divide_factor or float(self.mesh.data_size)

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
    reshard(model)
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


def reshard(model: nn.Module) -> None:
    """Lets FSDP2 free what a forward without backward has left gathered: `parameters()` are then what lies at rest."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def share_out(parameter: Tensor, entry: ParameterEntry) -> None:
    """Makes a gradient that was summed this rank's share of it again, so that more can be added and summed with it."""
    gradient = parameter.grad
    registry = entry.registry
    if gradient is None or not entry.needs_sum or entry.fqn in registry.unsummed:
        return
    with torch.no_grad():
        gradient = local_part(gradient)
        if entry.gradient == "partial":
            gradient /= registry.context.size
        for holders, part in entry.shared_parts(gradient):
            part.div_(len(holders))
        if entry.data == "reduced":
            gradient *= registry.divide_factor / registry.mesh.data_size
    registry.unsummed.add(entry.fqn)


def expect_gradients(model: nn.Module) -> None:
    """Says that a backward is to run: every gradient that is partial by nature waits for its sum from here.

    Does what the hooks on parameters do, for backwards that never fire them.
    """
    registry = registry_of(model)
    registry.norm = None
    if not registry.needs_sums:
        return
    for name, parameter in model.named_parameters():
        share_out(parameter, registry.entry(name))
    registry.unsummed.update(entry.fqn for entry in registry.entries.values() if entry.needs_sum)


def expect_before_forwards(model: nn.Module) -> None:
    """Lets every forward with a graph say so, before FSDP2 gathers parameters and their gradients are out of sight."""

    def expect(module: nn.Module, args: object) -> None:
        if torch.is_grad_enabled():
            expect_gradients(module)

    model.register_forward_pre_hook(expect, prepend=True)


def local_part(value: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient, as a plain tensor that shares its memory."""
    return cast("DTensor", value.detach()).to_local() if isinstance(value, DTensor) else value


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
