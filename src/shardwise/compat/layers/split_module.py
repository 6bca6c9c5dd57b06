"""Modules that divide themselves: parts of models that people write by hand, which nobody plans.

Each divides its own parameters over tp when it is built, from the values that the full ones would have had, so that
models of any tp size start alike after the same seed. What it does to activations is said at its own edges: gradients
of what enters and leaves are full, as anywhere outside of regions.

See `shardwise.compat.layers.by_hand` for the model around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from shardwise.comm.collectives import (
    copy_to_region,
    gather_full,
    gather_to_region,
    split_full,
)
from shardwise.comm.simulated import LoneGroup
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.parameters.canonical import full_value, local_tensor, take_parts
from shardwise.parameters.registry import (
    ParameterEntry,
    Registry,
    attach_entry,
    entries_of,
    entry_of,
    mark,
)
from shardwise.plan.decision import SplitPlan
from shardwise.runtime.axis import Axis
from shardwise.runtime.context import SplitContext
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import Replicate, Split, equal_sections
from shardwise.topology.axes import DATA_AXES

__all__ = [
    "Init",
    "SplitModule",
    "by_hand",
    "gather_features",
    "layout_of",
    "mark_known",
    "new_linear",
    "own_features",
    "running_alone",
]

Init = Callable[[Tensor], Any]


class SplitModule(nn.Module):
    """A module that divides its own parameters over tp.

    `load_state_dict` takes their full tensors as well as this rank's parts; `state_dict` gives this rank's parts.

    Attributes:
        placements: how each divided parameter is.
        partial_parameters: replicated parameters whose gradient on a rank is a term of the sum over tp, because they
            meet this rank's part of the sequence.
        padded_width: to how many features this rank's are filled up with zeros; see [Note: heads are padded in
            activations].
    """

    padded_width: int = 0
    partial_parameters: tuple[str, ...] = ()

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._split = SplitContext.of(mesh)
        self._provisional = Registry(
            mesh=mesh, plan=SplitPlan(shape=mesh.shape, parameters={}), context=self._split, local_state=True
        )
        self.placements: dict[str, Split] = {}
        self._draw: Callable[[], Mapping[str, Tensor | None]] = dict
        self.register_load_state_dict_pre_hook(take_parts)

    @property
    def _axis(self) -> Axis:
        return self._split.tp  # another one while `running_alone`

    def start(
        self,
        draw: Callable[[], Mapping[str, Tensor | None]],
        splits: Mapping[str, Split | None],
        device: torch.device | str | None,
    ) -> None:
        """Registers this rank's parts of the full parameters that `draw` gives, then and in `reset_parameters`."""
        self._draw = draw
        for name, full in draw().items():
            self.add_parameter(name, full, splits[name], device=device)
        self.mark_parameters()

    def mark_parameters(self) -> None:
        """Puts NxD's attributes on divided parameters, for code that reads them; nothing here does."""
        for name, split in self.placements.items():
            parameter: Any = self._parameters.get(name)
            if parameter is not None:  # another stage's
                parameter.tensor_model_parallel, parameter.partition_dim = True, split.dim
                parameter.partition_stride = max(map(len, split.pieces))

    def add_parameter(
        self, name: str, full: Tensor | None, split: Split | None, *, device: torch.device | str | None = None
    ) -> None:
        """Registers this rank's part of `full`; all of it where `split` is None, and no parameter where `full` is."""
        if full is None:
            self.register_parameter(name, None)
            return
        mesh = self._provisional.mesh
        layout = layout_of(full.shape, split, mesh)
        local = local_tensor(full, layout, mesh.coords)
        self.register_parameter(name, nn.Parameter(local.to(device) if device is not None else local))
        if split is not None:
            self.placements[name] = split
        entry = ParameterEntry(fqn=name, layout=layout, registry=self._provisional)
        attach_entry(self, name, entry)

    def divide_again(self, name: str, split: Split) -> None:
        """Divides a parameter otherwise, in place.

        Communicates: over tp, one all-gather of it.
        """
        mesh, parameter = self._provisional.mesh, self.get_parameter(name)
        mark(parameter, entries_of(self)[name])  # it may have been replaced
        full = full_value(parameter)
        layout = layout_of(full.shape, split, mesh)
        parameter.data = local_tensor(full, layout, mesh.coords).to(parameter)
        self.placements[name] = split
        attach_entry(self, name, ParameterEntry(fqn=name, layout=layout, registry=self._provisional))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Starts again: draws the full values, from torch's generator, seeded alike everywhere, and keeps its parts."""
        entries = entries_of(self)
        for name, full in self._draw().items():
            own = self._parameters[name]
            if own is not None and full is not None:
                own.copy_(local_tensor(full, entries[name].layout, self._provisional.mesh.coords))

    @property
    def mesh(self) -> Mesh:
        """What it is divided over."""
        return self._provisional.mesh

    def enter(self, x: Tensor, sequence_dim: int | None) -> Tensor:
        """`x` on its way to columns: its gradient is summed over tp, in float32 at least, and its parts along the
        sequence are joined.

        Communicates: over tp, one all-reduce of the gradient; with a `sequence_dim`, an all-gather forward and a
            reduce-scatter of the gradient.
        """
        group, dtype = self._split.tp.group, x.dtype
        if group is None:
            return x
        x = x.float() if x.is_floating_point() and dtype.itemsize < 4 else x
        x = copy_to_region(x, group) if sequence_dim is None else gather_to_region(x, group, dim=sequence_dim)
        return x.to(dtype)


@contextmanager
def running_alone(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Inside, the divided modules of `model` and of its copies, and whoever asks `mesh` for a group, communicate with
    nobody: as if the other ranks held what this one holds. For shapes, and for comparisons with itself.
    """
    contexts = {id(module._split): module._split for module in model.modules() if isinstance(module, SplitModule)}
    axes = {key: context.tp for key, context in contexts.items()}
    with mesh.represented(lambda group: LoneGroup(group.rank(), group.size())):
        try:
            for context in contexts.values():
                context.tp = Axis.of(mesh, "tp")
            yield
        finally:
            for key, context in contexts.items():
                context.tp = axes[key]


def layout_of(shape: Sequence[int], split: Split | None, mesh: Mesh, *, data_axes: bool = True) -> Layout:
    """Builds the layout of a parameter of a hand-written model: split or replicated over tp, replicated over data axes.

    Args:
        shape: the full shape, or the shape of this rank's part.
        split: how tp splits it; None: replicated.
        data_axes: whether the layout includes the data axes.
    """
    shape = tuple(shape) if split is None else (*shape[: split.dim], split.size, *shape[split.dim + 1 :])
    placements: list[tuple[str, Split | Replicate]] = [("tp", Replicate() if split is None else split)]
    placements += [(axis, Replicate()) for axis in reversed(DATA_AXES) if data_axes]
    return Layout(
        shape,
        tuple(Step(axis, mesh.size(axis), placement) for axis, placement in placements if mesh.size(axis) > 1),
    )


def by_hand(parameter: Tensor, mesh: Mesh) -> Split | None:
    """How a parameter is divided over tp whose owner sliced it himself, and says so by `tensor_model_parallel` True and
    `partition_dim` on it (and `partition_stride`: sections of a fused one, each divided); None of any other.

    Raises:
        ConfigError: the parameter has no such dim.
    """
    parts, said = mesh.size("tp"), vars(parameter)
    if parts == 1 or not said.get("tensor_model_parallel", False):
        return None
    dim, num_sections = said.get("partition_dim", 0), said.get("partition_stride", 1)
    if type(dim) is not int or not 0 <= dim < parameter.ndim:
        raise ConfigError(
            f"partition_dim is {dim!r} on a parameter of {tuple(parameter.shape)} with tensor_model_parallel",
            fix="set the dim of which each tp rank holds its part",
        )
    return equal_sections(dim, parameter.shape[dim] * parts, num_sections=num_sections, parts=parts)


def mark_known(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Gives parameters that nobody knows yet an entry, so that norms count each element once: every rank holds all of
    each, but of those that are divided `by_hand`.
    """
    registry = Registry(mesh=mesh, plan=SplitPlan(shape=mesh.shape, parameters={}), context=SplitContext.of(mesh))
    for parameter in parameters:
        if entry_of(parameter) is None:
            layout = layout_of(parameter.shape, by_hand(parameter, mesh), mesh)
            mark(parameter, ParameterEntry(fqn="", layout=layout, registry=registry))


def new_linear(
    out_features: int, in_features: int, *, bias: bool, init_weight: Init | None, dtype: torch.dtype | None
) -> dict[str, Tensor | None]:
    """The full `weight` and `bias` that an `nn.Linear` would start with, from the same random numbers."""
    weight = torch.empty(out_features, in_features, dtype=dtype)
    if init_weight is None:
        init.kaiming_uniform_(weight, a=math.sqrt(5))
    else:
        init_weight(weight)
    if not bias:
        return {"weight": weight, "bias": None}
    bound = 1 / math.sqrt(in_features) if in_features else 0.0
    return {"weight": weight, "bias": torch.empty(out_features, dtype=dtype).uniform_(-bound, bound)}


def gather_features(x: Tensor, split: Split, context: SplitContext) -> Tensor:
    """All ranks' features, in the order of the full tensor."""
    if context.tp.group is None:
        return x
    joined = gather_full(x, context.tp.group, dim=x.ndim - 1, sizes=split.local_sizes)
    order = _stored_order(split)
    return joined if order is None else joined[..., torch.tensor(order, device=x.device).argsort(stable=True)]


def own_features(x: Tensor, split: Split, context: SplitContext) -> Tensor:
    """This rank's features of a full tensor."""
    if context.tp.group is None:
        return x
    order = _stored_order(split)
    x = x if order is None else x[..., torch.tensor(order, device=x.device)]
    return split_full(x, context.tp.group, dim=x.ndim - 1, sizes=split.local_sizes)


def _stored_order(split: Split) -> list[int] | None:
    """Which features of the full tensor the parts hold, one after the other; None where that is in order."""
    order = [index for pieces in split.pieces for start, stop in pieces for index in range(start, stop)]
    return None if order == list(range(len(order))) else order
