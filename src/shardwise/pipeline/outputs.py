"""Outputs of a pipeline on every rank: the model's, and key/value caches of which every stage fills its own layers.

# [Note: outputs of a pipeline]
In evaluation and generation every rank gets the whole output at once. A training forward computes its loss and
gradients, and most loops read nothing else. So there the loss is distributed at once, and other tensors stay on the
last stage until all ranks compute with them, like logits split over tp (see [Note: logits that somebody looks at]).

# [Note: caches of stages]
A model asks its cache for the number of past positions, usually at layer 0 or the first layer of a kind. On a stage
that does not run that layer the answer would be 0, and positions and masks would be silently wrong. So after every
forward, the layers that this rank has not filled are advanced by the same number of positions. If a rank runs several
stages, a later stage must not see what an earlier one has added in the same forward: each stage gets copies of the
layers as they were before. The cache of an encoder-decoder consists of two: the decoder's self-attention cache, which
is advanced, and the cross-attention cache, which only its own layers read.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache, PreTrainedModel, StaticCache

from shardwise.comm.agree import meet
from shardwise.comm.collectives import Group, as_dtensor, broadcast_, broadcast_object
from shardwise.errors import UnsupportedError
from shardwise.loss.logits import as_logits, only_asks, takes_data
from shardwise.runtime.context import SplitContext
from shardwise.stages.absent import Absent
from shardwise.stages.model import cache_parts, copy_cache
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
    """Returns the output of the last stage, on every rank of a pipeline.

    Args:
        output: the last stage's output, on its rank, without gradients.
        own: arguments of the forward that every rank gets back as its own (caches).
        source: group rank of the last stage.
        later: whether tensors other than the loss stay on the last stage until they are used.
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
    """Returns the intermediate outputs of layers that a call asks for, by an argument or by the model's config."""
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
        """Returns the described output."""
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
        """Returns the plain tensor. Every rank must call this, or compute with the tensor."""
        value = self.fetch()
        return value.full_tensor() if isinstance(value, DTensor) else value

    def fetch(self) -> Tensor:
        """Returns the tensor as the last stage has it, possibly split over tp."""
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


def check_caches(arguments: Mapping[str, Any], *, num_stages_per_rank: int) -> None:
    """Raises if a cache cannot be used with stages."""
    for name, cache in _caches(arguments):
        parts = cache_parts(cache)
        layers = [layer for part in parts for layer in part.layers]
        is_shared = any(not hasattr(layer, "keys") or hasattr(layer, "recurrent_states") for layer in layers)
        is_static = any(isinstance(part, StaticCache) for part in parts)
        if (num_stages_per_rank > 1 and (is_shared or is_static)) or (len(parts) > 1 and is_static):
            raise UnsupportedError(
                f"{name} is a {type(cache).__name__}, and the model is in stages",
                why="every stage fills its own layers of a cache, and the others must be as long",
                fix="use_cache=False, or a DynamicCache",
            )


class StageCaches:
    """The caches among the arguments of one forward; see [Note: caches of stages]."""

    def __init__(self, arguments: Mapping[str, Any], *, num_stages_per_rank: int, device: torch.device) -> None:
        self._device = device
        self._given = dict(_caches(arguments))
        self._copies = num_stages_per_rank > 1
        # Now: a copied layer of a static cache shares its length, a tensor.
        self._before = {
            name: [_length(each) for each in cache_parts(cache)[0].layers] for name, cache in self._given.items()
        }
        self._fresh = {name: copy_cache(cache) for name, cache in self._given.items()}
        self.rows, self.length = _size(arguments)

    def __bool__(self) -> bool:
        return bool(self._given)

    def before(self) -> dict[str, Any]:
        """Returns the caches as they were before the forward; read-only."""
        return self._fresh

    def arguments(self) -> dict[str, Any]:
        """Returns the caches for one stage."""
        return {name: copy_cache(self._fresh[name]) if self._copies else cache for name, cache in self._given.items()}

    def keep(self, given: Mapping[str, Any]) -> None:
        """Stores what a stage has filled in the caller's caches."""
        for name, cache in self._given.items() if self._copies else ():
            parts = zip(cache_parts(cache), cache_parts(given[name]), cache_parts(self._fresh[name]), strict=True)
            for own, filled, before in parts:
                for number, layer in enumerate(filled.layers):
                    was = _length(before.layers[number]) if number < len(before.layers) else 0
                    is_own = _length(layer) != was and not isinstance(getattr(layer, "keys", None), Absent)
                    if number >= len(own.layers):
                        own.layers.append(layer)
                    elif is_own:
                        own.layers[number] = layer
            if len(cache_parts(cache)) > 1:
                updated = given[name].is_updated.items()
                cross = cache_parts(cache)[1].layers
                cache.is_updated |= {number: is_new for number, is_new in updated if _length(cross[number])}

    def advance(self) -> None:
        """Advances the layers of other ranks' stages as if they had been filled."""
        for name, cache in self._given.items():
            before, own = self._before[name], cache_parts(cache)[0]
            state = torch.zeros(self.rows, 1, self.length, 1, device=self._device)
            if not own.layers:  # which nobody here has filled
                own.update(state, state, 0)
            for number, layer in enumerate(own.layers):
                was = before[number] if number < len(before) else 0
                if _length(layer) == was and hasattr(layer, "keys"):
                    type(layer).update(layer, state, state)
                    layer.update = functools.partial(_extend, layer)
                if hasattr(layer, "recurrent_states"):
                    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


def _extend(layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Returns the replacement of a layer's `update` on other stages, where absent tensors flow through."""
    made = ((*x.shape[:-2], _length(layer) + x.shape[-2], x.shape[-1]) for x in (key, value))
    keys, values = (Absent.of(shape, key.dtype, key.device) for shape in made)
    return keys, values


def _caches(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Cache]]:
    return ((name, value) for name, value in arguments.items() if isinstance(value, Cache))


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def _size(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the rows and positions of the forward."""
    for name in ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds"):
        if arguments.get(name) is not None:
            rows, length = arguments[name].shape[:2]
            return rows, length
    return 1, 1
