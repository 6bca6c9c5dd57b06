"""Modules that split themselves, for hand-written models without a plan.

Each module splits its parameters over tp when it is built, from the values of the full parameters, so models of any tp
size start equal for one seed. Each module also converts activations at its own edges: gradients of its inputs and
outputs are full. `shardwise.compat.layers.by_hand` registers the model that holds them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from shardwise.comm.collectives import copy_to_region, gather_full, gather_to_region, split_full
from shardwise.comm.simulated import LoneGroup
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.parameters.canonical import full_value, local_tensor, take_parts
from shardwise.parameters.registry import ParameterEntry, Registry, attach_entry, entries_of, entry_of, mark
from shardwise.plan.decision import SplitPlan
from shardwise.runtime.context import Axis, SplitContext
from shardwise.runtime.modes import with_attributes
from shardwise.sharding.layout import Layout, steps_along
from shardwise.sharding.placement import Split, equal_sections
from shardwise.topology.shape import FSDP_AXES

Init = Callable[[Tensor], Any]


class SplitModule(nn.Module):
    """A module that splits its own parameters over tp.

    `load_state_dict` accepts full tensors and this rank's parts; `state_dict` returns this rank's parts.

    Attributes:
        placements: placement of each split parameter.
        partial_parameters: replicated parameters whose gradient on a rank is a partial sum over tp, because they are
            used on this rank's part of the sequence.
        padded_width: number of features to which this rank's features are zero-padded; see [Note: heads are padded
            in activations].
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
        """Registers this rank's parts of the full parameters that `draw` returns, now and in `reset_parameters`."""
        self._draw = draw
        for name, full in draw().items():
            self.add_parameter(name, full, splits[name], device=device)
        self.mark_parameters()

    def mark_parameters(self) -> None:
        """Sets NxD's attributes on split parameters, for code that reads them."""
        for name, split in self.placements.items():
            parameter: Any = self._parameters.get(name)
            if parameter is not None:  # another stage's
                parameter.tensor_model_parallel, parameter.partition_dim = True, split.dim
                parameter.partition_stride = max(map(len, split.pieces))

    def add_parameter(
        self, name: str, full: Tensor | None, split: Split | None, *, device: torch.device | str | None = None
    ) -> None:
        """Registers this rank's part of `full`: all of it if `split` is None, no parameter if `full` is None."""
        if full is None:
            self.register_parameter(name, None)
            return
        mesh = self._provisional.mesh
        layout = layout_of(full.shape, split, mesh)
        local = local_tensor(full, layout, mesh.coords)
        self.register_parameter(name, nn.Parameter(local.to(device) if device is not None else local))
        if split is not None:
            self.placements[name] = split
        attach_entry(self, name, ParameterEntry(fqn=name, layout=layout, registry=self._provisional))

    def divide_again(self, name: str, split: Split) -> None:
        """Changes the split of the parameter `name` to `split`, in place.

        Communicates: over tp, one all-gather of the parameter.
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
        """Draws the full values again, from torch's generator, seeded alike everywhere, and keeps this rank's parts."""
        entries = entries_of(self)
        for name, full in self._draw().items():
            own = self._parameters[name]
            if own is not None and full is not None:
                own.copy_(local_tensor(full, entries[name].layout, self._provisional.mesh.coords))

    @property
    def mesh(self) -> Mesh:
        """The mesh over which the module is split."""
        return self._provisional.mesh

    def enter(self, x: Tensor, sequence_dim: int | None) -> Tensor:
        """Converts `x` for column-split weights: its gradient is summed over tp, in float32 at least, and its parts
        along the sequence are gathered.

        Communicates: over tp, one all-reduce of the gradient; with a `sequence_dim`, an all-gather in forward and a
        reduce-scatter of the gradient in backward.
        """
        group, dtype = self._split.tp.group, x.dtype
        if group is None:
            return x
        x = x.float() if x.is_floating_point() and dtype.itemsize < 4 else x
        x = copy_to_region(x, group) if sequence_dim is None else gather_to_region(x, group, dim=sequence_dim)
        return x.to(dtype)


@contextmanager
def running_alone(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Context manager: the parallel layers of `model` and its copies, and users of `mesh`'s groups, communicate with
    nobody, as if all ranks held the same. For shapes, and for comparisons of a model with itself.
    """
    with mesh.represented(lambda group: LoneGroup(group.rank(), group.size())), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, SplitModule):
                stack.enter_context(with_attributes(module._split, tp=Axis.of(mesh, "tp")))
        yield


def layout_of(shape: Sequence[int], split: Split | None, mesh: Mesh, *, data_axes: bool = True) -> Layout:
    """Builds the layout of a parameter of a hand-written model: split or replicated over tp, replicated over data axes.
    The shape may be the full one or that of this rank's part.
    """
    shape = tuple(shape) if split is None else (*shape[: split.dim], split.size, *shape[split.dim + 1 :])
    over_data = steps_along(FSDP_AXES[::-1], mesh.shape) if data_axes else ()
    return Layout(shape, (*steps_along(["tp"], mesh.shape, split), *over_data))


def by_hand(parameter: Tensor, mesh: Mesh) -> Split | None:
    """Returns the split of a parameter that the user has sliced: marked by `tensor_model_parallel` True and
    `partition_dim` (and `partition_stride`: sections of a fused parameter, each split). None for other parameters.
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
    """Gives parameters without an entry one: as sliced by the user (`by_hand`), else as replicated on every rank."""
    registry = Registry(mesh=mesh, plan=SplitPlan(shape=mesh.shape, parameters={}), context=SplitContext.of(mesh))
    for parameter in parameters:
        if entry_of(parameter) is None:
            layout = layout_of(parameter.shape, by_hand(parameter, mesh), mesh)
            mark(parameter, ParameterEntry(fqn="", layout=layout, registry=registry))


def new_linear(
    out_features: int, in_features: int, *, bias: bool, init_weight: Init | None, dtype: torch.dtype | None
) -> dict[str, Tensor | None]:
    """Draws the full `weight` and `bias` of a linear from the same random numbers as `nn.Linear` does."""
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
    """Returns all ranks' features, in the order of the full tensor."""
    if context.tp.group is None:
        return x
    joined = gather_full(x, context.tp.group, dim=x.ndim - 1, sizes=split.local_sizes)
    order = _stored_order(split)
    return joined if order is None else joined[..., torch.tensor(order, device=x.device).argsort(stable=True)]


def own_features(x: Tensor, split: Split, context: SplitContext) -> Tensor:
    """Returns this rank's part of the last dim of a full `x`. Backward gathers the gradient."""
    if context.tp.group is None:
        return x
    order = _stored_order(split)
    x = x if order is None else x[..., torch.tensor(order, device=x.device)]
    return split_full(x, context.tp.group, dim=x.ndim - 1, sizes=split.local_sizes)


def _stored_order(split: Split) -> list[int] | None:
    """Returns the features of the full tensor in the order of the concatenated parts; None if they are in order."""
    order = [index for pieces in split.pieces for start, stop in pieces for index in range(start, stop)]
    return None if order == list(range(len(order))) else order
