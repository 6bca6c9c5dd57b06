"""Local gradients that know which full gradient they are a part of, so that torch's own norms and checks are those of
all ranks.

# [Note: gradients that know]
A rank's part of a gradient is an ordinary tensor to everything that works element by element: optimizers, clipping by
value, averages. A norm is not: torch's `clip_grad_norm_` would clip by another norm on every rank, and `GradScaler`
would step on some of them only. So where ranks hold parts, `p.grad` is of a class that answers these two questions for
the full gradients. A norm stays this rank's share until it is stacked with the others, as every total norm is; then one
all-reduce completes all of them. A check for infinite values is that of all ranks. A norm that is looked at by itself
is refused: a rank that logs it alone would wait for the others forever. So is whatever else would be another value on
every rank (see [Note: parameters outside of the model]), of `p.grad` or of what was computed from it element by
element: clipping by hand would scale every rank by a number of its own. Everything else gives plain tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.operations import all_reduce_
from shardwise.errors import UnsupportedError
from shardwise.parameters.local_parameter import kind_of
from shardwise.parameters.registry import LocalGradient, ParameterEntry, Registry, entry_of, local_part, mark

__all__ = ["as_local_gradient", "complete_norms", "norm_of_owned", "share_of_norm"]

_SUMMED = torch.float32
_RUN_ELEMENTS = 2**18


def as_local_gradient(gradient: Tensor, entry: ParameterEntry) -> Tensor:
    """`gradient`, of a class that knows of which full one it is a part (see [Note: gradients that know])."""
    if type(gradient) is Tensor:
        gradient = gradient.as_subclass(_LocalTensor)
    elif type(gradient) is DTensor:
        gradient.__class__ = _LocalDTensor
    mark(gradient, entry)
    return gradient


def share_of_norm(gradients: Iterable[tuple[Tensor, ParameterEntry | None]], order: float) -> Tensor:
    """The norm of what this rank owns of some gradients: over all ranks every element counts once. float32 scalar."""
    return norm_of_owned([(local_part(gradient), entry) for gradient, entry in gradients], order)


def norm_of_owned(values: Iterable[tuple[Tensor, ParameterEntry | None]], order: float) -> Tensor:
    """The same of what ranks hold of the gradients, as plain tensors. Nothing is copied."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for value, entry in values:
        narrow, wide = by_device.setdefault(value.device, ([], []))
        parts = narrow if value.dtype.itemsize < _SUMMED.itemsize else wide
        places = (None,) if entry is None else entry.owned_slices
        parts += [value if place is None else value[place] for place in places]
    norms: list[Tensor] = []
    for device, (narrow, wide) in by_device.items():
        if device.type == "cpu":
            narrow = [run for part in narrow for run in _runs(part)]
        norms += [*_norms_of(wide, order), *_norms_of(narrow, order, dtype=_SUMMED)]
    device = max(by_device, key=lambda device: device.type != "cpu", default=torch.device("cpu"))
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, _SUMMED) for norm in norms]), order)


def _norms_of(parts: Sequence[Tensor], order: float, **options: Any) -> Sequence[Tensor]:
    parts = [part for part in parts if part.numel()]
    return torch._foreach_norm(parts, order, **options) if parts else ()


def _runs(x: Tensor) -> Sequence[Tensor]:
    """Parts of `x` along its first dim: torch copies each to a wider dtype on CPUs."""
    return x.split(max(1, _RUN_ELEMENTS * len(x) // x.numel())) if x.numel() > _RUN_ELEMENTS and x.ndim else (x,)


def complete_norms(shares: Tensor, registry: Registry, order: float) -> Tensor:
    """The norms that the shares of all ranks add up to, for every entry of `shares`.

    Communicates: over all ranks, one all-reduce of as many values.
    """
    group = registry.mesh.group()
    if group is None:
        return shares
    shares = shares.to(registry.mesh.device)
    if math.isinf(order):
        is_nan = shares.isnan()  # which the largest of several values may leave out
        both = torch.stack([shares.masked_fill(is_nan, 0.0), is_nan.to(shares.dtype)])
        all_reduce_(both, group, largest=True)
        return both[0].masked_fill(both[1] > 0, torch.nan)
    powered = shares.pow(order)
    all_reduce_(powered, group)
    return powered.pow(1.0 / order)


def complete_each(shares: Tensor, registry: Registry, order: float) -> tuple[Tensor, Tensor]:
    """The norms that this rank's shares `[n]` are parts of, and the norm of all of them, other stages' included, which
    is the same on every rank to the last bit.

    Communicates: over all ranks, one all-reduce of as many values; of a pipeline, whose stages have other gradients,
        another of one value.
    """
    group, num_stages = registry.mesh.group(), registry.mesh.size("pp")
    _check_no_stage_is_idle(registry, "torch.nn.utils.clip_grad_norm_")
    if num_stages == 1 or group is None:
        completed = complete_norms(shares, registry, order)
        return completed, torch.linalg.vector_norm(completed, order)
    model = registry.model()
    assert model is not None, "its gradients are here"
    num_gradients = sum(parameter.grad is not None for parameter in model.parameters())
    if len(shares) != num_gradients:
        raise UnsupportedError(
            f"the norm of {len(shares)} of the {num_gradients} gradients of one stage of a pipeline",
            why="other stages may have none of these, and never ask, or ask for the norm of others at the same time",
            fix="use the norm of all: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        )
    most = torch.tensor(len(shares), device=registry.mesh.device)
    all_reduce_(most, group, largest=True)
    table = torch.zeros(num_stages, int(most), dtype=shares.dtype, device=registry.mesh.device)
    own = table[registry.mesh.coord("pp"), : len(shares)]
    own.copy_(shares)
    table = complete_norms(table, registry, order)
    return table[registry.mesh.coord("pp"), : len(shares)], torch.linalg.vector_norm(table, order)


def _check_no_stage_is_idle(registry: Registry, asked: str) -> None:
    """Raises where some stages train nothing: torch asks nothing of gradients that are not there, and this rank would
    wait for theirs.
    """
    idle = registry.idle_stages
    if idle:
        raise UnsupportedError(
            f"{asked} on a pipeline of which a part is frozen as a whole",
            why=f"the ranks at {', '.join(map(str, idle))} along pp have no gradients, and torch does nothing there",
            fix="use shardwise.clip_grad_norm_(model, max_norm), and Precision(compute=...) in place of a GradScaler, "
            "or other cuts: Pipeline(layers=...)",
        )


class _KnowsFull(LocalGradient):
    answers: ClassVar[Mapping[Any, Any]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        answer = cls.answers.get(func)
        if answer is not None:
            return answer(func, *args, **(kwargs or {}))
        if func is Tensor.detach_:  # torch's refuses views; a gradient has no history
            return args[0]
        has_parts = any(map(_is_part, (*args, *(kwargs or {}).values())))
        kind = kind_of(func, args, kwargs or {}) if has_parts else None
        if kind == "refused":
            raise _refused(f"{getattr(func, '__name__', func)} of a part of a gradient")
        if kind is not None:
            return _elements(func, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def plain(self) -> Tensor:
        """The same of torch's class."""
        raise NotImplementedError


class _LocalTensor(_KnowsFull, Tensor):
    def local(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    plain = local


class _LocalDTensor(_KnowsFull, DTensor):
    def local(self) -> Tensor:
        return self._local_tensor

    def full_tensor(self, **options: Any) -> Tensor:
        """Refused where tp splits the gradient, or may, too: torch would gather the parts of the data ranks alone."""
        entry = entry_of(self)
        if entry is None or entry.split is not None:
            raise _refused("full_tensor() of a part of a gradient")
        return super().full_tensor(**options)

    def plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()


class _PartTensor(_LocalTensor):
    """Elements of parts of gradients in another shape, of which no number is made."""


class _PartDTensor(_LocalDTensor):
    """The same over data ranks."""


class _NormShare(Tensor):
    """This rank's share of the norm of a gradient, until it is stacked with the others."""

    registry: Registry
    order: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.stack:
            return _stack(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.to:
                return _build_share(func(*args, **(kwargs or {})), args[0].registry, args[0].order)
            if getattr(func, "__name__", "") == "__get__" and not isinstance(found := func(*args), Tensor):
                return found  # its device, its dtype
        raise _refused("the norm of a part of the gradient of a single parameter")


class _StageNorms(Tensor):
    """The norms of one stage's gradients, of which the norm is that of all stages' gradients."""

    total: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _NORMS:
            return args[0].total
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _build_share(value: Tensor, registry: Registry, order: float) -> _NormShare:
    share = value.as_subclass(_NormShare)
    share.registry, share.order = registry, order
    return share


def _stack(shares: Sequence[Tensor], *args: Any, **options: Any) -> Tensor:
    """The norms themselves, stacked; those of other tensors than the model's are left as they are."""
    known = [isinstance(each, _NormShare) for each in shares]
    first = next(each for each in shares if isinstance(each, _NormShare))
    with torch._C.DisableTorchFunctionSubclass():
        plain = torch.stack([each.as_subclass(Tensor) for each in shares], *args, **options)
        completed, total = complete_each(plain, first.registry, first.order)
        found = torch.where(torch.tensor(known, device=plain.device), completed.to(plain.device), plain)
        if first.registry.mesh.size("pp") == 1:
            return found
        norms = found.as_subclass(_StageNorms)
        others = plain[~torch.tensor(known, device=plain.device)]
        norms.total = torch.linalg.vector_norm(torch.cat([total.to(plain.device).view(1), others]), first.order)
        return norms


def _norm(func: Any, gradient: Tensor, order: Any = None, *args: Any, **options: Any) -> Tensor:
    order = options.pop("p", options.pop("ord", order))
    is_of_matrix = func is torch.linalg.norm and order not in (None, "fro") and gradient.ndim > 1
    if is_of_matrix or any(value is not None and value is not False for value in (*args, *options.values())):
        raise _refused("a norm of a part of the gradient along some of its dims, or in another dtype")
    entry, number = entry_of(gradient), 2.0 if order in (None, "fro") else float(order)
    assert entry is not None
    return _build_share(share_of_norm([(gradient, entry)], number), entry.registry, number)


def _foreach_norm(func: Any, gradients: Sequence[Tensor], order: Any = 2.0, **options: Any) -> list[Tensor]:
    return [torch.linalg.vector_norm(gradient, options.get("ord", order)) for gradient in gradients]


def _unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """As `GradScaler` calls it; what one rank finds, all know."""
    func([local_part(gradient) for gradient in gradients], found_inf, inv_scale)
    entry = next(filter(None, map(entry_of, gradients)))
    group = entry.registry.mesh.group()
    _check_no_stage_is_idle(entry.registry, "GradScaler")
    if group is not None:
        all_reduce_(found_inf, group, largest=True)


def _same(func: Any, gradient: Tensor) -> Tensor:
    """Another tensor of the same values."""
    entry = entry_of(gradient)
    assert entry is not None
    with torch._C.DisableTorchFunctionSubclass():
        found = func(gradient)
    return as_local_gradient(found, entry)


def _number(func: Any, *args: Any, **options: Any) -> Any:
    """An error, but of the larger and the smaller of two, and along dims of a gradient that all ranks have."""
    if func in _OF_TWO and any(isinstance(each, Tensor) for each in (*args[1:], options.get("other"))):
        return _elements(func, *args, **options)
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **options)
    if any(map(_is_part, args)) or not isinstance(found, Tensor) or not found.ndim:
        raise _refused(f"{func.__name__} of a part of a gradient")
    return found


def _is_part(value: Any) -> bool:
    """Whether other ranks may hold the rest of it."""
    if not isinstance(value, _LocalTensor | _LocalDTensor):
        return False
    entry = entry_of(value)
    return entry is None or entry.split is not None or isinstance(value, DTensor)


def _elements(func: Any, *args: Any, **options: Any) -> Any:
    """A value for each element, or the elements in another shape: as much a part as the gradient is."""
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **options)
    if not isinstance(found, Tensor):
        raise _refused(f"{func.__name__} of a part of a gradient")
    if func not in _RESHAPES:
        for each in args:
            if isinstance(each, Tensor) and each.shape == found.shape and (entry := entry_of(each)) is not None:
                return as_local_gradient(found, entry)
    if type(found) is Tensor:
        return found.as_subclass(_PartTensor)
    if type(found) is DTensor:
        found.__class__ = _PartDTensor
    return found


def _named(*names: str) -> set[Any]:
    return {getattr(owner, name) for owner in (torch, Tensor) for name in names if hasattr(owner, name)}


_NORMS = (torch.norm, torch.linalg.vector_norm, torch.linalg.norm, Tensor.norm)
_NUMBERS = _named(
    *("sum", "nansum", "mean", "nanmean", "prod", "std", "var", "median", "max", "min", "amax", "amin", "dot", "vdot")
)
_OF_TWO = _named("max", "min")
_RESHAPES = _named(
    *("view", "reshape", "flatten", "ravel", "cat", "concat", "concatenate", "stack", "t", "transpose", "permute"),
    *("unsqueeze", "squeeze", "swapaxes", "movedim"),
) | {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
_ELEMENTWISE = _named(
    *("abs", "square", "sqrt", "neg", "pow", "__pow__", "mul", "__mul__", "__rmul__", "div", "true_divide"),
    *("__truediv__", "clone", "contiguous", "to", "float", "double", "cpu"),
)
_SHARED = dict.fromkeys(_NUMBERS, _number) | dict.fromkeys(_RESHAPES | _ELEMENTWISE, _elements)
_KnowsFull.answers = {
    **_SHARED,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys((Tensor.detach, Tensor.data.__get__), _same),  # type: ignore[attr-defined]
}
_PartTensor.answers = _PartDTensor.answers = {
    **_SHARED,
    **dict.fromkeys((*_NORMS, torch._foreach_norm), _number),
    **dict.fromkeys((Tensor.detach, Tensor.data.__get__), _elements),  # type: ignore[attr-defined]
}


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(
        what,
        why="other ranks hold the rest of it, and this rank cannot know whether they ask too",
        fix="use shardwise.clip_grad_norm_(model, max_norm), which returns the norm over all ranks (with math.inf it "
        "clips nothing), torch.nn.utils.get_total_norm on every rank, or shardwise.full_gradients(model)",
    )
