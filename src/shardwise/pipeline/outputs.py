"""Distributes the model's output from the last stage's rank to every rank of a pipeline.

# [Note: outputs of a pipeline]
In evaluation and generation every rank gets the whole output at once. A training forward computes its loss and
gradients, and most loops read nothing else. So there the loss is distributed at once, and other tensors stay on the
last stage until all ranks compute with them, like logits split over tp (see [Note: logits that somebody looks at]).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from shardwise.comm.agree import meet
from shardwise.comm.collectives import Group, as_dtensor, broadcast_, broadcast_object
from shardwise.errors import UnsupportedError
from shardwise.loss.logits import as_logits, only_asks, takes_data
from shardwise.runtime.context import SplitContext
from shardwise.tiny.families import sub_configs

_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""What transformers collects of every layer; of router logits it computes a part of the loss."""

_NUMBERS = itertools.count(1)
_ASKING = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"}
    | {"get_device", "__len__", "__set__"}
)


class _Slot(NamedTuple):
    """Describes a tensor: its local shape, and the full shape if it is split over tp."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Any = None
    full_shape: tuple[int, ...] = ()


class _Own(NamedTuple):
    """Stands for an object that every rank has, such as a cache, by the name of its argument."""

    name: str


class _Given(NamedTuple):
    """Stands for a tensor that the caller has passed (the encoder's output, in generation), by its number."""

    number: int


@dataclass(frozen=True)
class _Fields:
    """Stands for an output object."""

    kind: type
    values: dict[str, Any]


def broadcast_output(
    output: Any,
    own: Mapping[str, Any],
    context: SplitContext,
    group: Group,
    *,
    source: int,
    later: bool,
    change: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """Output of the last stage, on every rank of a pipeline.

    Args:
        output: the last stage's output, on its rank, without gradients.
        own: arguments of the forward that every rank gets back as its own (caches).
        later: whether tensors other than the loss stay there until they are used.
        change: applied to every tensor, or this rank's part of it, before it is returned.

    Communicates: over pp, a broadcast of a description and of every tensor, or only of the scalars.
    """
    tensors: list[Tensor] = []
    given = [
        x for x in tree_leaves([x for x in own.values() if isinstance(x, Tensor | Mapping)]) if isinstance(x, Tensor)
    ]
    described = None
    if group.rank() == source:
        described = _describe(output, tensors, {id(x): number for number, x in enumerate(given)})
    described = broadcast_object(described, group, source=source)
    return _Receiver(tensors, given, own, context, group, source, later, change).rebuild(described)


def _describe(value: Any, tensors: list[Tensor], known: Mapping[int, int], name: str = "") -> Any:
    if isinstance(value, Tensor) and id(value) in known:
        return _Given(known[id(value)])
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        tensors.append(local.detach().contiguous())
        number, shape = len(tensors) - 1, tuple(local.shape)
        if isinstance(value, DTensor):
            return _Slot(number, shape, local.dtype, value.placements, tuple(value.shape))
        return _Slot(number, shape, local.dtype)
    if isinstance(value, dict):
        return _Fields(type(value), {key: _describe(each, tensors, known, str(key)) for key, each in value.items()})
    if type(value) in (tuple, list):
        return type(value)(_describe(each, tensors, known, name) for each in value)
    return value if value is None or isinstance(value, int | float | str) else _Own(name)


def asked_outputs(model: nn.Module, arguments: Mapping[str, Any]) -> frozenset[str]:
    """Intermediate outputs of layers that a call asks for, by arguments of these names or by the model's config."""
    configs = list(sub_configs(model.config)) if isinstance(model, PreTrainedModel) else []
    by_config = {name: any(getattr(config, name, False) for config in configs) for name in _COLLECTED}
    given = {name: value for name, value in arguments.items() if name in _COLLECTED and value is not None}
    return frozenset(name for name, is_asked in {**by_config, **given}.items() if is_asked)


def check_asked_outputs(model: nn.Module, arguments: Mapping[str, Any], at_cut: frozenset[str]) -> None:
    """Raises the same error on every rank if a call asks for outputs that stages do not support.

    Args:
        at_cut: outputs that were asked for when the model was cut.
    """
    if not (asked := asked_outputs(model, arguments)):
        return
    what = f"{{}}=True of a {type(model).__name__} in stages"
    for name in _COLLECTED[:2]:
        if name in asked:
            raise UnsupportedError(
                what.format(name),
                why="each rank of pp has those of its own layers",
                fix="leave it out, or use pp_size 1",
            )
    for name in sorted(asked - at_cut):
        raise UnsupportedError(
            what.format(name),
            why="nothing asked for them when the model was cut, so no stage sends them",
            fix=f"set config.{name} = True before the model is split",
        )


@dataclass(frozen=True)
class _Receiver:
    """Creates the tensors of an output on every rank; see `broadcast_output`."""

    tensors: list[Tensor]
    given: list[Tensor]
    own: Mapping[str, Any]
    context: SplitContext
    group: Group
    source: int
    later: bool
    change: Callable[[Tensor], Tensor] | None

    def receive(self, slot: _Slot) -> Tensor:
        if self.group.rank() == self.source:
            local = self.tensors[slot.number]
        else:
            local = torch.empty(slot.shape, dtype=slot.dtype, device=self.context.device)
        broadcast_(local, self.group, source=self.source)
        if self.change is not None:
            local = self.change(local)
        if slot.placements is None:
            return local
        return as_logits(as_dtensor(local, self.context.mesh, slot.placements, slot.full_shape), self.context)

    def rebuild(self, described: Any) -> Any:
        """The described output."""
        if isinstance(described, _Slot):
            is_later = self.later and described.full_shape + described.shape
            return RemoteTensor(self, described) if is_later else self.receive(described)
        if isinstance(described, _Given):
            return self.given[described.number]
        if isinstance(described, _Own):
            if described.name not in self.own:
                what, name = described.name or "an object", described.name or "it"
                raise UnsupportedError(
                    f"the model returns {what}, of which every stage of a pipeline has its own",
                    fix=f"pass {name} to the forward, or ask for use_cache=False",
                )
            return self.own[described.name]
        if isinstance(described, _Fields):
            values = {name: self.rebuild(value) for name, value in described.values.items()}
            return described.kind(**values) if described.kind is not dict else values
        return type(described)(map(self.rebuild, described)) if type(described) in (tuple, list) else described


class RemoteTensor(Tensor):
    """A tensor on the last stage's rank. An operation that reads it fetches it, on every rank of the pipeline alike.

    Communicates: over pp, one broadcast at the first such operation.
    """

    _receiver: _Receiver
    _slot: _Slot
    _fetched: Tensor | None
    _name: str

    @staticmethod
    def __new__(cls, receiver: _Receiver, slot: _Slot) -> "RemoteTensor":
        shape, device = slot.full_shape or slot.shape, receiver.context.device
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=slot.dtype, device=device)
        self._receiver, self._slot, self._fetched = receiver, slot, None
        self._name = f"shardwise/outputs/{next(_NUMBERS)}"
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if takes_data(func):
            return args[0]
        if only_asks(func, _ASKING):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_present, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_present, (args, kwargs or {}))
        return func(*args, **kwargs)

    def full_tensor(self) -> Tensor:
        """The plain tensor. Every rank must call this, or compute with the tensor."""
        value = self.fetch()
        return value.full_tensor() if isinstance(value, DTensor) else value

    def fetch(self) -> Tensor:
        """The tensor as the last stage has it, possibly split over tp."""
        if self._fetched is None:
            group = self._receiver.group
            name = f"{self._name}/{dist.get_process_group_ranks(group)[0]}"
            meet(
                group,
                name,
                timeout=self._receiver.context.timeout,
                who="pp",
                looks_at="the output of a forward",
                why="the last stage has it",
            )
            self._fetched = self._receiver.receive(self._slot)
        return self._fetched


def _present(value: Any) -> Any:
    return value.fetch() if isinstance(value, RemoteTensor) else value


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Merges the outputs of all microbatches: rows are concatenated, scalars are summed with weights."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, dict):
        fields = {name: merge_outputs([each[name] for each in outputs], weights) for name in first}
        kind: Callable[..., Any] = type(first)
        return kind(**fields) if kind is not dict else fields
    if type(first) in (tuple, list):
        return type(first)(merge_outputs(parts, weights) for parts in zip(*outputs, strict=True))
    if not isinstance(first, Tensor):
        return first
    if not first.ndim:
        return sum(value.detach() * weight for value, weight in zip(outputs, weights, strict=True))
    if isinstance(first, DTensor):
        local = torch.cat([part.to_local().detach() for part in outputs])
        shape = (sum(part.shape[0] for part in outputs), *first.shape[1:])
        return as_dtensor(local, first.device_mesh, first.placements, shape)
    return torch.cat([value.detach() for value in outputs])
