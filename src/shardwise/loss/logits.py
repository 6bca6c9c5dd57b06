"""Logits of a split model: split over tp, deferred until something reads them, gathered when it does.

# [Note: logits that somebody looks at]
A training step needs no rank to hold all logits, so they stay split. The first operation that reads them (an accuracy,
an auxiliary loss) gathers them, once per forward, with gradient. Metadata (`shape`, `dtype`, `detach()`, `print`) and
`DTensor`'s own methods (`to_local()`, `placements`) gather nothing.

The user's code starts this collective. Usually all tp ranks run the same code, but one rank may look alone (`if rank ==
0:`) while the others run another collective. So the ranks first meet through the process group's store. A rank that
waits alone raises before it communicates.

# [Note: deferred logits]
In a `TrainStep` the caller sees only the loss, not the logits. There the head returns `DeferredLogits`: its input, and
the operations applied to the logits before the loss. Indexing, flattening and shifting of rows are applied to the
head's input instead. Elementwise operations with numbers are recorded. `F.cross_entropy` then computes chunk by chunk
([Note: the loss without logits] in cross_entropy.py). Any other operation materializes the logits. Logits that fit in
one chunk are materialized at once.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.comm.agree import meet
from shardwise.comm.collectives import gather_full
from shardwise.errors import LayoutError
from shardwise.loss import cross_entropy
from shardwise.loss.cross_entropy import Head, LossOptions, head_cross_entropy
from shardwise.runtime.context import SplitContext
from shardwise.runtime.linear import apply_mixin

_NUMBERS = itertools.count(1)

_ASKING = frozenset(
    {"size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "is_floating_point", "is_complex"}
    | {"is_contiguous", "get_device", "_is_view", "__len__", "__format__", "__set__"}
    | {"requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"}
)
"""Methods of a tensor that do not read its values."""

_READING = frozenset({"T", "mT", "H", "mH", "real", "imag"})  # attributes of a tensor that read its values


def attribute_of(func: Any) -> str | None:
    """Returns the name of the tensor attribute that a torch function reads; None for other functions."""
    is_read = getattr(func, "__name__", "") == "__get__"
    return getattr(getattr(func, "__self__", None), "__name__", "") if is_read else None


def takes_data(func: Any) -> bool:
    """Returns whether `func` is `detach` or the getter of `data`."""
    return getattr(func, "__name__", "") == "detach" or attribute_of(func) == "data"


def only_asks(func: Any, asking: Collection[str]) -> bool:
    """Returns whether `func` reads only metadata of a tensor: it is a method in `asking`, or an attribute's getter."""
    attribute = attribute_of(func)
    return getattr(func, "__name__", "") in asking or (attribute is not None and attribute not in _READING)


@dataclass
class _Look:
    """State that copies of the same split logits share.

    Attributes:
        name: name of the logits, the same on every tp rank.
        full: the gathered logits; None before they are gathered.
    """

    context: SplitContext
    name: str = field(default_factory=lambda: f"shardwise/logits/{next(_NUMBERS)}")
    full: Tensor | None = None
    detached: "_Look | None" = None


class SplitLogits(DTensor):
    """Logits `[..., vocabulary]` split over tp. An operation that reads them gets the full logits.

    Communicates: over tp, one all-gather at the first such operation; nothing in backward.
    """

    _look: _Look

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if takes_data(func):
            return args[0]._detached()
        if only_asks(func, _ASKING):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        def full(value: Any) -> Any:
            return value.full_tensor() if isinstance(value, SplitLogits) else value

        return func(*tree_map(full, args), **tree_map(full, kwargs))

    @property
    def is_gathered(self) -> bool:
        """Whether the logits have been gathered. From then on the full logits count, which may have been written to."""
        return self._look.full is not None

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Returns the full logits as a plain tensor. Every tp rank must call this, or compute with the logits."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        look = self._look
        if look.full is None:
            meet(
                look.context.tp.group,
                look.name,
                timeout=look.context.timeout,
                after=look.context.last_gathered,
                who="tp",
                looks_at="the logits of a forward",
                why="each has a part of them",
            )
            look.context.last_gathered = look.name
        return self.gather_parts()

    def gather_parts(self) -> Tensor:
        """Returns the full logits like `full_tensor`, without the check that every tp rank calls it."""
        look = self._look
        if look.full is None:
            (placement,) = self.placements
            assert isinstance(placement, Shard)
            axis = look.context.tp
            sizes = axis.even_sizes(self.shape[placement.dim])
            with torch.enable_grad():  # whether or not this look needs a gradient, the next one may
                look.full = gather_full(self.to_local(), axis.group, dim=placement.dim, sizes=sizes)
        return look.full

    def _detached(self) -> Tensor:
        look = self._look
        if look.full is not None:
            return look.full.detach()
        if look.detached is None:
            look.detached = _Look(look.context, f"{look.name}/detached") if self.requires_grad else look
        with torch._C.DisableTorchFunctionSubclass():
            return _tagged(self.detach(), look.detached)


@register_sharding(torch.ops.aten._is_any_true.default)
def _is_any_true(value: Any) -> list[Any]:
    """Returns the sharding rule for `torch.autograd.detect_anomaly`, which calls this on every gradient: gather."""
    return [([Replicate()], [Replicate()])]


def as_logits(value: Any, context: SplitContext) -> Any:
    """Converts a `DTensor` with only `Shard` placements to `SplitLogits`; returns other values unchanged."""
    if type(value) is not DTensor or not all(isinstance(placement, Shard) for placement in value.placements):
        return value
    return _tagged(value, _Look(context))


def _tagged(value: Any, look: _Look) -> SplitLogits:
    value.__class__ = SplitLogits
    value._look = look
    return value


_STEPS = frozenset({"float", "to", "type", "mul", "div", "true_divide", "tanh", "add", "sub", "clamp", "sigmoid"})
"""What is done element by element, with numbers alone, gives floating-point values, and writes into nothing."""

_PLAIN = (Tensor, FakeTensor)
_CASTS = frozenset({"float", "to", "type"})
_OPERATORS = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__add__": "add", "__sub__": "sub"}
_ASKING_DEFERRED = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "__len__"}
    | {"_is_view", "register_hook"}
)
_ASKED = frozenset(
    {"shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "grad", "is_leaf", "is_cuda", "is_meta"}
    | {"layout", "_base"}
)


@dataclass
class _Source:
    """Origin of deferred logits.

    Attributes:
        finish: converts the head's local output to the usual logits.
        live: all tensors derived from these logits, in order. They are materialized together, because the next
            operation may write in place.
    """

    hidden: Tensor
    head: Head
    num_classes: int
    context: SplitContext
    finish: Callable[[Tensor], Tensor] | None = None
    live: "list[weakref.ref[DeferredLogits]]" = field(default_factory=list)
    is_made: bool = False

    def make(self) -> None:
        """Materializes the logits and all tensors derived from them."""
        self.is_made = True
        with torch.enable_grad():  # whether or not this needs a gradient, the next thing done may
            for each in [found for reference in self.live if (found := reference()) is not None]:
                if each._parent is not None:
                    each._value = each._step(each._parent._value)
                else:
                    logits = F.linear(self.hidden, self.head.weight, self.head.bias)
                    each._value = logits if self.finish is None else self.finish(logits)


@dataclass(frozen=True)
class _Step:
    """A function with all arguments except the logits."""

    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, logits: Tensor) -> Tensor:
        result: Tensor = self.function(logits, *self.args, **self.kwargs)
        return result


class DeferredLogits(Tensor):
    """Logits `[..., classes]` that are materialized on demand; see [Note: deferred logits]."""

    _source: _Source
    _hidden: Tensor
    _steps: tuple[_Step, ...]
    _parent: "DeferredLogits | None"
    _step: Any
    _value: Any

    @staticmethod
    def of_head(hidden: Tensor, head: Head, context: SplitContext) -> "DeferredLogits":
        """Returns the deferred output of `head` for the input `hidden`."""
        return _new(_Source(hidden, head, head.weight.shape[0], context), hidden, (), hidden.dtype)

    def split_over(self, num_classes: int, finish: Callable[[Tensor], Tensor]) -> "DeferredLogits":
        """Marks deferred logits, straight from the head, as this rank's part of `num_classes`."""
        source = replace(self._source, num_classes=num_classes, finish=finish, live=[])
        return _new(source, self._hidden, (), self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        done = go_on(func, args, kwargs)
        return func(*make(args), **make(kwargs)) if done is NotImplemented else done

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise LayoutError(f"{func} was given logits that were not made", fix="use torch's own functions on them")

    def _then(self, step: _Step, moved: Tensor, *, steps: Any = None, dtype: Any = None) -> "DeferredLogits":
        steps = self._steps if steps is None else steps
        return _new(self._source, moved, steps, dtype or self.dtype, parent=self, step=step)

    def _continued(self, step: _Step, *, has_tensors: bool) -> "DeferredLogits | None":
        """Returns the result of `step`, deferred; None if the logits must be materialized for it."""
        name, args = step.name, step.args
        if name in _STEPS and not has_tensors:
            made = step(torch.empty(0, dtype=self.dtype, device=self.device))
            is_alike = made.is_floating_point() and made.device == self.device
            return self._then(step, self._hidden, steps=(*self._steps, step), dtype=made.dtype) if is_alike else None
        moved: Tensor | None = None
        if name in ("view", "reshape") and not step.kwargs:
            moved = self._viewed(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        elif name == "flatten":
            moved = self._flattened(*args, **step.kwargs)
        elif name == "__getitem__" and _leaves_classes(args[0], self.ndim):
            moved = self._hidden[args[0]]
        elif name == "contiguous":
            moved = self._hidden
        return self._then(step, moved) if moved is not None else None

    def _viewed(self, shape: Any) -> Tensor | None:
        if not isinstance(shape, tuple | list) or not all(isinstance(size, int) for size in shape):
            return None
        leading = math.prod(size for size in shape[:-1])
        is_last = shape[-1] == self.shape[-1] or (shape[-1] == -1 and leading * self.shape[-1] == self.numel())
        return self._hidden.reshape(*shape[:-1], self._hidden.shape[-1]) if is_last and len(shape) > 1 else None

    def _flattened(self, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
        last = end_dim % self.ndim
        return self._hidden.flatten(start_dim, last) if last < self.ndim - 1 else None

    def _cross_entropy(self, target: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        """Computes `F.cross_entropy` of deferred logits; None if they must be materialized for it."""
        if self.ndim != 2 or target.is_floating_point() or type(target) not in _PLAIN:
            return None
        steps = self._steps
        while steps and steps[-1].name in _CASTS:  # the loss is computed in float32 anyway
            steps = steps[:-1]
        return head_cross_entropy(
            self._hidden,
            replace(self._source.head, steps=steps),
            target,
            axis=self._source.context.tp,
            num_classes=self._source.num_classes,
            options=LossOptions.of(*args, **kwargs),
        )


class DeferringHead:
    """Mixin of a linear that defers its output if the model's output is dropped."""

    _deferral: SplitContext
    _most_classes: int

    def forward(self, x: Tensor) -> Tensor:
        """Args: x `[..., features]`. Returns `[..., classes]`."""
        module: Any = self
        weight, bias = module.weight, module.bias
        num_rows = x.numel() // max(1, x.shape[-1])
        is_large = num_rows * self._most_classes > cross_entropy.CHUNK_ELEMENTS
        if not (is_large and self._deferral.drops_output and _can_defer(x)):
            out: Tensor = super().forward(x)  # type: ignore[misc]
            return out
        return DeferredLogits.of_head(x, Head(weight, bias), self._deferral)


@contextmanager
def dropped_output(context: SplitContext) -> Iterator[None]:
    """Context manager: the caller uses only the loss of the forwards inside."""
    context.drops_output = True
    try:
        yield
    finally:
        context.drops_output = False


def apply_deferral(head: nn.Module | None, context: SplitContext, most_classes: int | None = None) -> None:
    """Lets `head` defer its logits, in place, if it is a plain `nn.Linear`. Communicates nothing.

    Args:
        head: linear layer. Its weight must stay gathered from forward to backward, because the loss multiplies with it.
        most_classes: largest number of classes of a tp rank, so that all ranks decide alike; default: the head's own.
    """
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        apply_mixin(head, DeferringHead, _deferral=context, _most_classes=most_classes or head.weight.shape[0])


def go_on(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes `func` without materializing the logits; returns NotImplemented if it cannot."""
    name = getattr(func, "__name__", "")
    name = _OPERATORS.get(name, name)
    if name in _ASKING_DEFERRED or attribute_of(func) in _ASKED:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    logits = args[0] if args else kwargs.get("input")
    others = [each for each in tree_leaves((args[1:], kwargs)) if isinstance(each, Tensor) and each is not logits]
    is_alone = isinstance(logits, DeferredLogits) and not any(isinstance(each, DeferredLogits) for each in others)
    if not is_alone or logits._source.is_made:
        return NotImplemented
    rest = {name: each for name, each in kwargs.items() if name != "input"}
    if func is F.cross_entropy:
        done = logits._cross_entropy(*args[1:], **rest)
    else:
        done = logits._continued(_Step(func, name, args[1:], rest), has_tensors=bool(others))
    return NotImplemented if done is None else done


def make(values: Any) -> Any:
    """Returns `values` with deferred logits materialized."""

    def made(value: Any) -> Any:
        if not isinstance(value, DeferredLogits):
            return value
        if not value._source.is_made:
            value._source.make()
        return value._value

    return tree_map(made, values)


def _new(
    source: _Source,
    hidden: Tensor,
    steps: tuple[_Step, ...],
    dtype: torch.dtype,
    *,
    parent: DeferredLogits | None = None,
    step: _Step | None = None,
) -> DeferredLogits:
    shape = (*hidden.shape[:-1], source.num_classes)
    new: DeferredLogits = Tensor._make_wrapper_subclass(
        DeferredLogits, shape, dtype=dtype, device=hidden.device, requires_grad=True
    )
    with torch._C.DisableTorchFunctionSubclass():
        new.register_hook(_refuse_gradient)
    new._source, new._hidden, new._steps, new._parent, new._step = source, hidden, steps, parent, step
    source.live.append(weakref.ref(new))
    return new


def _refuse_gradient(gradient: Tensor) -> None:
    raise LayoutError(
        "a gradient of logits that were not made",
        why="a torch.autograd.Function took the logits as they are, which no function of torch does",
        fix="compute the loss outside of TrainStep, by model(**batch).loss.backward()",
    )


def _can_defer(x: Tensor) -> bool:
    """Returns whether the product of `x` can be computed later, and again, with the same result."""
    is_plain = type(x) in _PLAIN and not torch.compiler.is_compiling()
    return is_plain and torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)


def _leaves_classes(index: Any, num_dims: int) -> bool:
    """Returns whether an index keeps the last dim whole and in last place."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is ... or isinstance(each, int | slice | Tensor) for each in items):
        return False
    reached = sum(
        each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 1
        for each in items
        if each is not None and each is not ...
    )
    if not any(each is ... for each in items) and reached < num_dims:
        return True
    return items[-1] is ... or (isinstance(items[-1], slice) and items[-1] == slice(None))
