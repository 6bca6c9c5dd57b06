"""Parameters that know to be parts of full ones, so that numbers made of them outside of the model are refused.

# [Note: parameters outside of the model]
Inside of a model's forward a part is an ordinary parameter, and costs nothing more: while the model or a step runs, its
class has no functions of its own. Outside, `p.pow(2).sum()` would be another number on every rank, `F.linear(x, p)` a
part of a product, and `nn.init.normal_(p)` would draw the same numbers for different parts. These are refused, of
parameters that tp or fsdp split and of what was computed from them element by element. (A `DTensor` knows that its sum
is partial, and its `item()` is this rank's share all the same.) Whatever else is done with them is torch's business,
and so is all that our code asks, PEFT's, torch's own engines and the modules of the model, when they are called by
themselves. Gradients have rules of their own (see [Note: gradients that know]).
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import LocalGradient, find_parameters, has_entries

__all__ = ["functional_refused", "guard_parameters", "hidden", "hide", "kind_of", "show"]


class _Part:
    """A part of a parameter, or what was computed from it element by element."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self.plain(), memo)
        return nn.Parameter(copied, cast(Tensor, self).requires_grad) if isinstance(self, nn.Parameter) else copied

    def detach(self) -> Any:
        """As torch's; for `nn.Parameter`, which demands it, of the same class."""
        if sys._getframe(1).f_code is not nn.Parameter.__new__.__code__:
            return Tensor.detach(cast(Tensor, self))
        found: Any = _plainly(Tensor.detach, self)
        if not isinstance(found, DTensor):
            return found.as_subclass(type(self))
        found.__class__ = type(self)  # type: ignore[assignment]
        return found

    def plain(self) -> Tensor:
        """The same of torch's class, without a gradient."""
        found: Any = _plainly(Tensor.detach, self)
        return found if isinstance(found, DTensor) else found.as_subclass(Tensor)


class _Value(_Part, Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


class _DValue(_Part, DTensor):
    """The same of what the data ranks alone have parts of."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


class _OverTp(DTensor):
    """What tp splits too: torch would gather the parts of the data ranks, and call that full."""

    def full_tensor(self, **options: Any) -> Tensor:
        """Refused."""
        if _is_of_the_model(sys._getframe(1)):
            return super().full_tensor(**options)
        raise _refused("full_tensor")


class _OverTpValue(_OverTp, _DValue):
    """The same of what tp splits too."""


class _Assigned:
    """A parameter that takes what is assigned to `data`, or says why not. A `DTensor` would go on with what it had."""

    @property
    def data(self) -> Any:
        """As torch's."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        own = cast(Tensor, self)
        if not isinstance(own, DTensor) and value.shape == own.shape:
            _DATA.__set__(own, value)
            return
        if not isinstance(own, DTensor) or not isinstance(value, DTensor) or not _is_alike(own, value):
            kind = type(value).__name__ if isinstance(value, DTensor) else "Tensor"
            raise UnsupportedError(
                f"p.data = a {kind} of {list(value.shape)}, of a parameter of which this rank holds a part",
                why=f"that is {tuple(getattr(own, '_local_tensor', own).shape)} of {own.dtype}, split as before",
                fix="assign what was made of p (p.data * 0.5, a clone of p), or load full tensors by load_state_dict",
            )
        with torch.no_grad():
            own.to_local().copy_(value.to_local())


def _is_alike(one: DTensor, two: DTensor) -> bool:
    return (one.shape, one.dtype, one.placements) == (two.shape, two.dtype, two.placements)


class _LocalParameter(_Assigned, _Part, nn.Parameter):
    pass


class _LocalDParameter(_Assigned, _Part, DTensor):
    """The same of what the data ranks alone have parts of."""


class _OverTpParameter(_OverTp, _LocalDParameter):
    """The same of what tp splits too."""


class _DParameter(_Assigned, _Part, DTensor):
    """One of which every data rank has a copy: numbers made of it are right."""


_DATA: Any = Tensor.data
_CLASSES: tuple[Any, ...] = (
    *(_Value, _DValue, _OverTpValue, _LocalParameter, _LocalDParameter, _OverTpParameter),
    _DParameter,
)


def _plainly(func: Any, *args: Any, **options: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **options)


def _answer(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    kwargs = kwargs or {}
    if func is torch.autograd.grad and any(issubclass(each, DTensor) for each in types):
        raise functional_refused("parameters that data ranks share")
    if _DParameter in types and len(types) == 1:
        return _plainly(func, *args, **kwargs)
    kind = kind_of(func, args, kwargs)
    if kind == "refused":
        raise _refused(getattr(func, "__name__", str(func)))
    found = _plainly(func, *args, **kwargs)
    first = args[0] if args else None
    is_made_of_part = kind == "elements" or (kind == "form" and isinstance(first, _Part | list | tuple))
    return _as_value(found, args) if is_made_of_part else found


def kind_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Literal["elements", "form", "refused"] | None:
    """What a function that is called on parts, outside of the model, makes of them: a value for each element, the
    elements in another form, or what would be another value on every rank. None where our code asks, or torch's, and
    for all other functions. Call it from `__torch_function__`.
    """
    kind = _KINDS.get(func)
    if kind is None or torch.compiler.is_compiling() or _is_of_the_model(sys._getframe(1)):
        return None
    if kind == "index":
        is_fault = isinstance(args[0], LocalGradient) and len(args) == 3 and _is_fault(args[2])
        return "refused" if _counts(args[1]) and not is_fault else None
    if kind == "empty":
        return "refused" if _is_drawn() else None
    if kind == "number" and any(isinstance(each, Tensor) for each in (*args[1:], kwargs.get("other"))):
        return "elements"  # `max` is also that of two
    return "elements" if kind == "elements" else "form" if kind == "form" else "refused"


def _as_value(found: Any, args: Any) -> Any:
    if isinstance(found, tuple | list):
        return type(found)(_as_value(each, args) for each in found)
    if type(found) is Tensor:
        return found.as_subclass(_Value)
    if type(found) is DTensor:
        given = (each for arg in args for each in (arg if isinstance(arg, tuple | list) else (arg,)))
        found.__class__ = _OverTpValue if any(isinstance(each, _OverTp) for each in given) else _DValue
    return found


def _counts(index: Any) -> bool:
    """Whether an index says which elements by their numbers, which are others in the full tensor: no mask does."""
    if isinstance(index, tuple):
        return any(map(_counts, index))
    if isinstance(index, Tensor):
        return index.dtype is not torch.bool
    return index is not None and index is not Ellipsis and index != slice(None)


def _is_fault(value: Any) -> bool:
    """Whether it is an infinity or NaN: planted in a gradient, it is one wherever it is."""
    return isinstance(value, float) and not math.isfinite(value)


def _is_drawn() -> bool:
    """Whether `nn.init` asks for an empty tensor, as it does to draw in it."""
    return sys._getframe(3).f_globals.get("__name__") == "torch.nn.init"


def _is_of_the_model(frame: FrameType | None) -> bool:
    """Whether our code asks, or one that knows of parts or asks nothing of their values, or a module of the model runs.

    The one who asks is the first whose code is not of torch's functions.
    """
    asks = True
    while frame is not None:
        if asks:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(_FUNCTIONS):
                if name.startswith(_MAY_ASK):
                    return True
                asks = False
        if frame.f_code.co_name == "_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and has_entries(module):
                return True
        frame = frame.f_back
    return False


_FUNCTIONS = (
    "shardwise.parameters.local_",
    *("torch.nn.init", "torch.nn.functional", "torch.functional", "torch._tensor", "torch.nn.utils", "torch._jit"),
    *("torch.linalg", "torch.overrides", "torch.utils._contextlib"),
)
_MAY_ASK = ("shardwise.", "peft.", "torch.")

_running: list[object] = []


def hide(owner: object = None) -> None:
    """From here on the model runs, or another `owner`, and parameters are ordinary ones; without one until the next
    `show`.
    """
    if owner is not None:
        _end(owner)  # of what Ctrl-C has interrupted
        _running.append(owner)
    for each in _CLASSES:
        each.__torch_function__ = torch._C._disabled_torch_function_impl


def show(owner: object = None) -> None:
    """It has ended."""
    _end(owner)
    if not _running:
        for each in _CLASSES:
            each.__torch_function__ = _ANSWER


def _end(owner: object) -> None:
    for place, each in enumerate(_running):
        if each is owner:
            del _running[place:]
            return


@contextmanager
def hidden() -> Iterator[None]:
    """Inside, parameters are ordinary ones."""
    owner = object()
    hide(owner)
    try:
        yield
    finally:
        show(owner)


def guard_parameters(model: nn.Module) -> None:
    """Has parameters of which ranks hold parts refuse numbers that are made of them while the model does not run, and
    what would not be assigned.
    """
    has_parts = False
    for _, parameter, entry in find_parameters(model):
        known: Any = parameter
        is_split = entry is not None and entry.split is not None
        is_sharded = isinstance(known, DTensor) and any(not each.is_replicate() for each in known.placements)
        has_parts = has_parts or is_split or is_sharded
        if type(known) is DTensor:
            known.__class__ = _OverTpParameter if is_split else _LocalDParameter if is_sharded else _DParameter
        elif type(known) is nn.Parameter and is_split:
            known.__class__ = _LocalParameter
    if has_parts:
        model.register_forward_pre_hook(_enter, prepend=True)
        model.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        hide(module)


def _leave(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        show(module)


def _named(names: str) -> list[Any]:
    """The functions of these names, wherever torch has them."""
    owners = (torch, Tensor, F, torch.linalg, nn.init)
    return [getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)]


_KINDS: Mapping[Any, str] = {
    function: kind
    for kind, names in {
        "elements": """
            add sub subtract rsub mul multiply div divide true_divide pow float_power __add__ __radd__
            __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __abs__ abs
            absolute neg negative square sqrt rsqrt reciprocal exp log log1p sign tanh sigmoid relu gelu
            softplus clamp clip lerp addcmul addcdiv maximum minimum nan_to_num where gt lt ge le __gt__
            __lt__ __ge__ __le__
        """,
        "form": """
            clone detach contiguous to float double half bfloat16 cpu cuda view reshape flatten ravel t
            transpose permute unsqueeze squeeze cat concat concatenate stack swapaxes movedim
        """,
        "number": """
            sum nansum mean nanmean prod std var std_mean var_mean median max min amax amin aminmax argmax
            argmin quantile logsumexp softmax log_softmax cumsum sort argsort topk kthvalue count_nonzero
            histc trace norm vector_norm matrix_norm svdvals
        """,
        "whole": """
            _foreach_norm matmul __matmul__ __rmatmul__ mm bmm mv addmm einsum dot vdot inner outer linear
            bilinear embedding embedding_bag index_select conv1d mse_loss l1_loss smooth_l1_loss huber_loss
            cosine_similarity normalize svd normal_ uniform_ trunc_normal_ kaiming_normal_ kaiming_uniform_
            bernoulli_ eye exponential_ cauchy_ log_normal_ geometric_ random_ rand_like randn_like randint_like
            bernoulli dropout select narrow unbind split chunk tensor_split take gather scatter scatter_
            index_fill_ index_copy_ index_add_ index_put_
        """,
        "index": "__getitem__ __setitem__",
        "empty": "new_empty",
    }.items()
    for function in _named(names)
} | dict.fromkeys((getattr(Tensor, name).__get__ for name in ("data", "T", "mT")), "form")


def functional_refused(what: str) -> UnsupportedError:
    """The error of gradients that are asked for past `.grad`."""
    return UnsupportedError(
        f"torch.autograd.grad of {what}",
        why="every rank holds a part of the sum that these gradients are, and nobody has summed them yet",
        fix="call backward(), after which parameter.grad is complete",
    )


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} of a part of a parameter, outside of the model",
        why="other ranks hold the rest of it: every rank would have another number, or draw the same for other parts",
        fix="use the optimizer's weight_decay for a penalty, the module for a product (model.lm_head(hidden)),\n"
        "shardwise.full_state_dict(model) for statistics, and draw values before the split (docs/own-loop.md)",
    )


for _types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types.extend(_CLASSES)  # as Parameter is
_ANSWER = classmethod(_answer)
show()
