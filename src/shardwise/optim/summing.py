"""Sums that complete gradients over tp, the data axes and stages, and the timing of FSDP2's reductions."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Group, all_reduce_, host_device
from shardwise.errors import GradientError, UnsupportedError, listed
from shardwise.mesh import Mesh
from shardwise.parameters.registry import DataHandling, ParameterEntry, Registry, entry_of, local_part
from shardwise.plan.rule import UNREACHED
from shardwise.topology.shape import FSDP_AXES

Value = TypeVar("Value")


class _Summand:
    """A parameter's gradient during the sums.

    # [Note: gradients that some ranks lack]
    An expert that none of this rank's tokens chose has no gradient here, but may have one on another rank. The layout
    alone decides what is summed, so that all ranks sum the same tensors. Zeros replace a missing gradient, and a flag
    per gradient counts the ranks that have it. If the sum of the flags is zero, no rank has the gradient, and it stays
    None as in the unsplit model: an optimizer must not decay it. Only a rank without a gradient reads the sums.

    Attributes:
        local: this rank's gradient, zeros if it is missing; afterwards the sum.
        present: `[1]`, the number of ranks that have the gradient.
    """

    present: Tensor

    def __init__(self, parameter: nn.Parameter, entry: ParameterEntry) -> None:
        gradient = parameter.grad
        self.entry, self.parameter, self.is_lacking = entry, parameter, gradient is None
        self.local = torch.zeros_like(local_part(parameter)) if gradient is None else local_part(gradient)


def _summands(parameters: Sequence[tuple[nn.Parameter, ParameterEntry]]) -> list[_Summand]:
    summands = [_Summand(*each) for each in parameters]
    for same in _by_kind(summands, [each.local for each in summands]).values():
        flags = _flags([not each.is_lacking for each in same], like=same[0].local)
        for each, flag in zip(same, flags.split(1), strict=True):
            each.present = flag
    return summands


def _flags(values: Sequence[bool], *, like: Tensor) -> Tensor:
    """Ones for true values, zeros for others, `[n]`. Does not synchronize with the device."""
    if all(values):
        return like.new_ones(len(values))
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def _by_kind(values: Sequence[Value], tensors: Sequence[Tensor]) -> dict[Any, list[Value]]:
    """Groups values whose `tensors` have one dtype and one device."""
    groups: dict[Any, list[Value]] = {}
    for value, tensor in zip(values, tensors, strict=True):
        groups.setdefault((tensor.dtype, tensor.device), []).append(value)
    return groups


@torch.no_grad()
def complete_gradients(parameters: Sequence[tuple[nn.Parameter, ParameterEntry]], registry: Registry) -> None:
    """Sums the gradients of these parameters over all ranks that hold parts of them. Removes zero gradients that FSDP2
    made for parameters that no rank has used (see [Note: parameters that no rank used]).

    Communicates: over the data axes, one all-reduce of the gradients that FSDP2 has not reduced and of the record of
    used parameters; over tp, one of all partial gradients of a dtype together, and one per group of ranks that share
    key/value heads; over each group of stages that share parameters, one.
    """
    summands = _summands(parameters)
    _sum_over_data([each for each in summands if each.entry.data is DataHandling.ALL_REDUCE], registry)
    for axes in sorted({tuple(sorted(each.entry.partial_over)) for each in summands if each.entry.partial_over}):
        same = [each for each in summands if each.entry.partial_over == frozenset(axes)]
        _sum_together([part for each in same for part in (each.local, each.present)], registry.mesh.group(*axes))
    shared: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    for each in summands:
        if each.entry.holders:
            parts = [part for _, part in each.entry.shared_parts(each.local)]
            shared.setdefault(each.entry.holders, []).extend((*parts, each.present))
    for holders, parts in shared.items():
        _sum_together(parts, registry.mesh.subgroup("tp", holders))
    tied: dict[tuple[int, ...], list[_Summand]] = {}
    for each in sorted(summands, key=lambda each: each.entry.fqn):  # stages meet them in different orders
        if len(each.entry.stage_coords) > 1:
            tied.setdefault(each.entry.stage_coords, []).append(each)
    for stages, same in sorted(tied.items()):
        _sum_over_stages(stages, same, registry)
    _give_to_lacking([each for each in summands if each.is_lacking and each.parameter.requires_grad])
    _refuse_unproved(summands)


def _give_to_lacking(summands: Sequence[_Summand]) -> None:
    """Sets missing gradients to the sum, if another rank has one. Reads the device once per dtype."""
    for same in _by_kind(summands, [each.local for each in summands]).values():
        for each, count in zip(same, torch.cat([each.present for each in same]).tolist(), strict=True):
            if count:
                each.parameter.grad = each.entry.wrap(each.local)


def _refuse_unproved(summands: Sequence[_Summand]) -> None:
    """Raises if a parameter inside of a split region has a gradient although no trial of the plan has used it."""
    planned = {each.entry.fqn: each.entry.registry.plan.parameters.get(each.entry.fqn) for each in summands}
    names = [
        each.entry.fqn
        for each in summands
        if each.entry.partial_over and each.parameter.grad is not None
        if (found := planned[each.entry.fqn]) is not None and found.rule.reason == UNREACHED
    ]
    if names:
        raise UnsupportedError(
            f"a gradient of {listed(names, 1)}",
            why="the batches with which its plan was found and tried never used it, and it lies where ranks compute "
            "parts: nothing proves that this gradient is right",
            fix="have the model use it on small random batches too, give rules for it, or use a layout without tp",
        )


def _sum_over_data(reduced: Sequence[_Summand], registry: Registry) -> None:
    """Sums the gradients outside of FSDP2, and removes those in FSDP2 that no rank has used."""
    group, uses = registry.mesh.group(*FSDP_AXES), registry.uses
    parts = [part for each in reduced for part in (each.local, each.present)]
    if group is not None and uses.has_reduced:
        like = parts[0] if parts else torch.empty((), device=host_device(group, registry.mesh.device))
        counts = _flags(uses.used(), like=like)
        _sum_together([*parts, counts], group)
        uses.settle(counts)
    else:
        _sum_together(parts, group)
    if reduced and registry.divide_factor != 1.0:
        torch._foreach_div_([each.local for each in reduced], registry.divide_factor)


def _sum_over_stages(stages: tuple[int, ...], summands: Sequence[_Summand], registry: Registry) -> None:
    """Sums the gradients of parameters that the stages at these pp coords share. All of these stages call it."""
    group = registry.mesh.subgroup("pp", (stages,))
    trained = [_flags([each.parameter.requires_grad], like=each.local) for each in summands]
    _sum_together([part for each in summands for part in (each.local, each.present)] + trained, group)
    for each, count in zip(summands, trained, strict=True):
        if float(count) not in (0.0, float(len(stages))):
            raise GradientError(
                f"{each.entry.fqn} is trained by {int(count)} of the {len(stages)} stages that hold it",
                why="their copies would become different",
                fix="freeze it on every rank or on none: shardwise.parallelize a model whose parameters are frozen",
            )


def _sum_together(parts: Sequence[Tensor], group: Group | None) -> None:
    """Sums every tensor over `group` in place, in one collective per dtype and device."""
    if group is None:
        return
    for same in _by_kind(parts, parts).values():
        flat = torch.cat([part.reshape(-1) for part in same])
        all_reduce_(flat, group)
        sums = flat.split([part.numel() for part in same])
        torch._foreach_copy_(same, [summed.view_as(part) for part, summed in zip(same, sums, strict=True)])


@torch.no_grad()
def scale_back_to_partial(parameter: Tensor, entry: ParameterEntry) -> None:
    """Divides a summed gradient by the number of ranks that share it, so that summing it again gives the same value."""
    if parameter.grad is None:
        return
    registry, gradient = entry.registry, local_part(parameter.grad)
    if entry.partial_over:
        gradient /= math.prod(map(registry.mesh.size, entry.partial_over))
    if len(entry.stage_coords) > 1:
        gradient /= len(entry.stage_coords)
    for holders, part in entry.shared_parts(gradient):
        part.div_(len(holders))
    if entry.data is DataHandling.ALL_REDUCE:
        gradient *= registry.divide_factor / registry.mesh.data_size


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Averages the gradients of unregistered models over the data ranks, in place. Those of registered models are.

    Every rank must pass the same parameters. A missing gradient counts as zeros, and exists afterwards.

    Communicates: over the data axes, one all-reduce per dtype.
    """
    group = mesh.group(*FSDP_AXES)
    if group is None:
        return
    gradients: list[Tensor] = []
    for parameter in parameters:
        entry = entry_of(parameter)
        if not parameter.requires_grad or (entry is not None and entry.data):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local_part(parameter.grad))
    _sum_together(gradients, group)
    multiply(gradients, 1 / mesh.data_size)


@torch.no_grad()
def multiply_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiplies this rank's part of every gradient by `factor`.

    Args:
        parameters: the sharded parameters that optimizers hold. Modules may hold gathered ones instead.
    """
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    multiply(gradients, factor)


def multiply(values: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies plain tensors of any dtypes and devices in place."""
    for (_, device), same in _by_kind(values, values).items():
        torch._foreach_mul_(same, factor.to(device) if isinstance(factor, Tensor) else factor)


def time_reduction(registry: Registry, *, is_last: bool) -> None:
    """Sets what FSDP2 reduces and frees in the next backward, by `FsdpPolicy.zero_stage`.

    Args:
        is_last: whether it is the last backward of a step.
    """
    root: Any = registry.data_root
    if root is None:
        return
    mesh, stage = registry.mesh, registry.policy.zero_stage
    root.set_is_last_backward(is_last)
    if stage == 1 or mesh.size("fsdp") == 1:
        root.set_requires_gradient_sync(is_last)
    elif mesh.size("ddp") > 1:
        root.set_requires_all_reduce(is_last)
    if stage < 3:
        root.set_reshard_after_backward(is_last)
