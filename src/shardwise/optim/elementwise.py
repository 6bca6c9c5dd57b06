"""Decides whether an optimizer may update parts of parameters: torch's by a table, others by a trial on tiny tensors.

An elementwise optimizer (SGD, Adam and similar ones) updates a part exactly like the full parameter. Others read a full
matrix: its spectrum (Muon), its rows and columns (Adafactor), its norm (LAMB), or all parameters together (LBFGS). They
would compute another update on every rank.
"""

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardwise.errors import UnsupportedError
from shardwise.optim.steps import class_of
from shardwise.parameters.registry import DataHandling, ParameterEntry, entry_of

_ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD),
)
_OF_MATRICES = (optim.Adafactor, optim.LBFGS, optim.Muon)
_SIZE, _NUM_STEPS, _LR = 4, 3, 0.01
_ALLOWED = 1e-3  # of the largest update
_PASSED: set[tuple[Any, ...]] = set()  # trials that passed: class, options, and on which tensors
_CHECKED: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def check_optimizer(optimizer: torch.optim.Optimizer, options: Mapping[str, Any] | None = None) -> None:
    """Raises if an optimizer would update the parameters of a split model differently from full ones.

    Args:
        options: the optimizer's constructor arguments; default: those in its groups.

    Communicates: nothing.
    """
    if _CHECKED.get(optimizer) == len(optimizer.param_groups):
        return
    kind = class_of(optimizer)
    for group in (each for each in optimizer.param_groups if each["params"]):  # a stage may have nothing to train
        entries = [entry for each in group["params"] if (entry := entry_of(each)) is not None]
        if kind is optim.SparseAdam:
            raise _refused(optimizer, "it does not support dense gradients")
        if kind is optim.Rprop and any(entry.data is DataHandling.FSDP for entry in entries):
            raise _refused(optimizer, "torch's cannot update DTensors, as parameters over fsdp and ddp are")
        if kind in _OF_MATRICES and any(map(_is_apart, entries)):
            raise _refused(optimizer, "it is not elementwise, and ranks hold parts")
        if kind not in (*_ELEMENTWISE, *_OF_MATRICES) and any(e.registry.mesh.shape.world_size > 1 for e in entries):
            is_apart = any(map(_is_apart, entries))
            kinds = {(each.ndim, each.dtype, each.device): each for each in group["params"]}
            for like in kinds.values():  # it may treat matrices, or values in bfloat16, in a way of their own
                _try(optimizer, {**(options or {}), **group}, like, is_apart=is_apart)
    _CHECKED[optimizer] = len(optimizer.param_groups)


def assume_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Marks the optimizer as elementwise, so that it needs no trial."""
    _CHECKED[optimizer] = len(optimizer.param_groups)


def _is_apart(entry: ParameterEntry) -> bool:
    """Returns whether the rank holds only a part of the parameter, or is one of several stages."""
    return entry.split is not None or entry.chunk is not None or entry.registry.mesh.size("pp") > 1


def _try(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], like: Tensor, *, is_apart: bool) -> None:
    """Trains two tiny tensors with the dims, dtype and device of `like` twice, then in halves if parameters are split.

    Both runs must give the same result. An optimizer that draws random numbers fails.
    """
    taken = inspect.signature(type(optimizer).__init__).parameters
    known = {name: value for name, value in options.items() if name in taken and name != "params"}
    if known.get("lr") is not None:  # a schedule may start from 0
        known["lr"] = _LR
    num_dims = like.ndim
    described = sorted((name, repr(value)) for name, value in known.items())
    tried = type(optimizer), is_apart, num_dims, like.dtype, str(like.device), tuple(described)
    if tried in _PASSED:
        return
    device, kind = like.device, type(optimizer)
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(2, 1 + _NUM_STEPS, *[_SIZE] * num_dims, generator=generator).to(like.device, like.dtype)
        values = [draw[0] for draw in draws], [[draw[step + 1] for draw in draws] for step in range(_NUM_STEPS)]
        try:
            full, *again = (torch.stack(_train(kind, known, *values)) for _ in range(2))
            for dim in range(num_dims) if is_apart else ():
                parts = [
                    _train(kind, known, [start], [[x] for x in steps])[0]
                    for draw in draws
                    for start, *steps in zip(*(x.chunk(2, dim) for x in draw), strict=True)
                ]
                again.append(torch.stack([torch.cat(parts[:2], dim), torch.cat(parts[2:], dim)]))
        except Exception as error:
            raise _refused(optimizer, f"trying it on tiny tensors: {type(error).__name__}: {error}") from error
    worst, largest = (float((x - y).abs().max()) for x, y in ((torch.stack(again), full), (full, draws[:, 0])))
    if not worst <= _ALLOWED * largest:
        why = f"tried twice, or on halves, it is not elementwise: updates of {largest:.1e} differ by {worst:.1e}"
        raise _refused(optimizer, why)
    _PASSED.add(tried)


def _train(
    optimizer_class: Any, options: Mapping[str, Any], starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Returns the tensors after several steps, each step with one gradient per tensor."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = optimizer_class(parameters, **options)
    for same_step in gradients:
        for parameter, gradient in zip(parameters, same_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step(lambda: torch.zeros(()))
    return [parameter.detach() for parameter in parameters]


def _refused(optimizer: torch.optim.Optimizer, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} on parameters of this split model",
        why=why,
        fix="use an elementwise optimizer (SGD, Adam, AdamW, …), build_optimizer(..., elementwise=True) if it is one,\n"
        "or a layout that leaves parameters in one piece (ddp)",
    )
