"""Collects the content of a checkpoint on this rank: model, optimizer, scheduler, random states and values.

Some lists of a scheduler have one entry per optimizer group, and groups differ between layouts, and between the stages
of one layout. Their options are stored by parameter; these lists are stored as rank 0 has them. So ranks compare only
the rest. When a scheduler is loaded with its optimizer, the entries are taken from the groups' options.
"""

import copy
import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.checkpoint.stored import encode_tree
from shardwise.errors import ConfigError, LoadError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.parameters.canonical import state_tensors
from shardwise.parameters.registry import ParameterEntry, Registry, find_parameters, local_part
from shardwise.parameters.replicas import Copies
from shardwise.runtime.adapter_facts import is_adapter
from shardwise.runtime.same_batch import describe_steps
from shardwise.sharding.boxes import Box, intersect, move, slices
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import OnCoords, Replicate
from shardwise.weights.write import DTYPES, crc_of

_OPTIONS = {"base_lrs": "initial_lr", "_last_lr": "lr"}  # lists of schedulers, and the group's option that each repeats
_EQUAL = ("min_lrs", "lr_lambdas")  # lists that no option repeats: they fit other groups where all entries are equal
_INNER = "_schedulers"


def common_state(state: Any) -> Any:
    """Returns the part of a scheduler's `state` that must be equal on every rank, whatever groups its optimizer has."""
    if not isinstance(state, Mapping):
        return state
    found = {name: value for name, value in state.items() if name not in _OPTIONS}
    for name in found.keys() & {*_EQUAL}:
        found[name] = found[name][:1] if _are_equal(found[name]) else found[name]
    if _INNER in found:
        found[_INNER] = [common_state(each) for each in found[_INNER]]
    return found


def state_for_groups(state: Any, groups: Sequence[Mapping[str, Any]], *, keeps_last: bool = False) -> Any:
    """Converts `state` to the state of a scheduler whose optimizer has these `groups`.

    Args:
        keeps_last: whether `_last_lr` stays, because another scheduler drives this one, or the groups' rates are not
            those that were saved.
    """
    if not isinstance(state, Mapping):
        return state
    found = dict(state)
    for name in found.keys() & _OPTIONS.keys():
        values = [group.get(_OPTIONS[name]) for group in groups]
        if None not in values and not (keeps_last and name == "_last_lr" and len(found[name]) == len(groups)):
            found[name] = [value.clone() if isinstance(value, Tensor) else value for value in values]
    for name in found.keys() & {*_EQUAL}:
        if len(found[name]) != len(groups):
            if not _are_equal(found[name]):
                raise LoadError(
                    f"the scheduler's {name} differ, and were of other parameter groups",
                    why=f"{len(found[name])} entries for what are {len(groups)} groups now",
                    fix="load it with the layout it was saved with, or build the scheduler again",
                )
            found[name] = found[name][:1] * len(groups)
    if _INNER in found:
        found[_INNER] = [state_for_groups(each, groups, keeps_last=True) for each in found[_INNER]]
    return found


def _are_equal(values: Sequence[Any]) -> bool:
    return all(each == values[0] for each in values)


def random_axes(mesh: Mesh) -> dict[str, int]:
    """Returns the mesh sizes on which random streams depend: saved streams continue only at equal sizes."""
    return {"pp": mesh.size("pp"), "data": mesh.data_size, "cp": mesh.size("cp")}


def read_random(mesh: Mesh) -> dict[str, Tensor]:
    """Returns the states of this rank's streams by key; empty if an earlier tp rank has the same."""
    if mesh.coord("tp"):
        return {}
    state: Any = numpy.random.get_state()
    _, keys, *rest = state
    version, numbers, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*keys.tolist(), int(rest[0]), int(rest[1])], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(rest[2])], dtype=torch.float64),
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
    }
    if gauss is not None:
        found["python_gauss"] = torch.tensor([gauss], dtype=torch.float64)
    if mesh.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(mesh.device)
    return {f"{_place(mesh)}/{kind}": value for kind, value in found.items()}


def restore_random(mesh: Mesh, saved_axes: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
    """Continues this rank's streams from the states `saved`, or starts new ones in another layout.

    Ranks that compute on the same rows start from equal states, whatever their tp coordinate (see [Note: random
    numbers]). So states belong to a stage and a data rank. If the numbers of both are the same, each stream continues.
    Otherwise every rank starts a new stream, seeded by the saved states and its data rank: the same on every such
    layout, and different on each data rank.
    """
    if dict(saved_axes) != random_axes(mesh):
        first = min(key for key in saved if key.endswith("/torch"))
        digest = hashlib.sha256(f"{mesh.data_rank}".encode() + saved[first].numpy().tobytes())
        seed = int.from_bytes(digest.digest()[:8], "little") >> 1
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        random.seed(seed)
        return
    place = f"{_place(mesh)}/"
    own = {key.removeprefix(place): value for key, value in saved.items() if key.startswith(place)}
    torch.set_rng_state(own["torch"].clone())
    *keys, position, has_gauss = own["numpy"].tolist()
    gauss = float(own["numpy_gauss"])
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    version, *numbers = own["python"].tolist()
    python_gauss = float(own["python_gauss"]) if "python_gauss" in own else None
    random.setstate((version, tuple(numbers), python_gauss))
    if "cuda" in own and mesh.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"].clone(), mesh.device)


def _place(mesh: Mesh) -> str:
    return f"random/{mesh.coord('pp')}.{mesh.coord('cp')}.{mesh.data_rank}"


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of a parameter or persistent buffer.

    Attributes:
        name: canonical name, that of the unsplit model.
        entry: entry in the registry; None for a buffer, and for a frozen parameter added after the split.
    """

    name: str
    value: Tensor
    layout: Layout
    entry: ParameterEntry | None


def model_key(name: str) -> str:
    """Returns the key of a model tensor in a checkpoint."""
    return f"model/{name}"


def state_key(name: str, state: str, optimizer: str = "") -> str:
    """Returns the key of a parameter's state in a checkpoint. `optimizer`: the optimizer's name, if it has one."""
    return f"optimizers/{optimizer}/{name}/{state}" if optimizer else f"optimizer/{name}/{state}"


def by_name(given: Any) -> dict[str, Any]:
    """Returns optimizers or schedulers by name: those of a list by their numbers, a single one as ""."""
    if isinstance(given, Mapping):
        named = {str(name): each for name, each in given.items()}
        if len(named) < len(given):
            raise ConfigError(f"two of the names {', '.join(map(repr, given))} are the same text", fix="rename one")
        return named
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return {"": several[0]} if len(several) == 1 else {str(number): each for number, each in enumerate(several)}


def called(kind: str, name: str) -> str:
    """Returns the words for an optimizer or scheduler in a message."""
    return f"the {kind} {name!r}" if name else f"the {kind}"


def local_shards(model: nn.Module, registry: Registry) -> dict[str, LocalShard]:
    """Returns every parameter and persistent buffer that this rank holds, by canonical name, tied ones once.

    Other split models inside of `model` are left out and must be frozen.
    """
    root = registry.model() or model
    outside = _named_outside(model, root)
    if clashing := sorted(outside.keys() & {*registry.entries, *state_tensors(root)}):
        raise UnsupportedError(
            f"a checkpoint in which {clashing[0]} is of the split model, and of the module around it",
            why="tensors are stored by the split model's own names",
            fix="give the one that is beside the split model another name",
        )
    held: dict[str, LocalShard] = {}
    for name, parameter, entry in find_parameters(model):
        if entry is None:
            held[name] = LocalShard(name, parameter, Layout(tuple(parameter.shape)), None)
        elif entry.registry is registry and entry.is_held:
            held[entry.fqn] = LocalShard(entry.fqn, parameter, entry.layout, entry)
        elif entry.registry is not registry and parameter.requires_grad:
            raise UnsupportedError(
                f"a checkpoint of several models that are split and trained: {name} is of another than the first",
                why="tensors are stored by the names that one model gives them",
                fix="save each model by itself",
            )
    for name, value in {**state_tensors(root), **outside}.items():
        if not isinstance(value, nn.Parameter) and name not in held:
            held[name] = LocalShard(name, value, Layout(tuple(value.shape)), None)
    return held


def _named_outside(model: nn.Module, root: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, by name, of a wrapper that are outside of the split model `root`."""
    if root is model:
        return {}
    split = [root, *(entry.registry.model() for _, _, entry in find_parameters(model) if entry is not None)]
    roots = {id(each): each for each in split if each is not None}.values()
    inside = {id(value) for each in roots for value in (*each.parameters(), *each.buffers())}
    return {name: value for name, value in state_tensors(model).items() if id(value) not in inside}


def is_unsharded(layout: Layout) -> bool:
    """Returns whether every rank that holds any element of a tensor holds all of it."""
    return all(isinstance(step.placement, Replicate | OnCoords) or step.size == 1 for step in layout.steps)


def slices_of(
    layout: Layout, coords: Mapping[str, int], boxes: Iterable[Box]
) -> tuple[tuple[Box, tuple[slice, ...]], ...]:
    """Pairs each of `boxes` of the full tensor with its slices in this rank's local tensor."""
    pieces = (*layout.pieces(coords), *layout.owned(coords))

    def local_box(box: Box) -> Box:
        return next(move(box, piece.full, piece.local) for piece in pieces if intersect(box, piece.full) == box)

    return tuple((box, slices(local_box(box))) for box in boxes)


@dataclass(frozen=True)
class OptimizerContent:
    """States and options of an optimizer, by parameter.

    Attributes:
        called: the words for it in messages.
        options: options of every parameter's group, by the parameter's name, as JSON.
        described: for every parameter and state: `{"like": dtype}` if it has the parameter's shape and split,
            `{"scalar": number, "dtype": dtype}`, `{"value": JSON}`, `{"whole": dtype, "shape": …}`, or `{"ranks":
            dtype, "shape": …}` for a state that only ranks of the same layout can load.
        tensors: this rank's part of the states that are neither scalar nor value, by parameter and state.
    """

    called: str
    class_name: str
    options: dict[str, Any]
    described: dict[str, dict[str, Any]]
    tensors: dict[tuple[str, str], Tensor]


def named_groups(
    optimizer: Any, shards: Mapping[str, LocalShard], name: str = ""
) -> Iterator[tuple[dict[str, Any], list[LocalShard]]]:
    """Yields every parameter group of an optimizer with the model's parameters in it, without other frozen ones."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"{called('optimizer', name)} is a {type(optimizer).__name__}"
        raise ConfigError(what, fix="pass a torch.optim.Optimizer, or a list or dictionary of them")
    by_id = {id(each.value): each for each in shards.values()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in by_id:
                what = f"{called('optimizer', name)} holds a parameter of shape {tuple(parameter.shape)}"
                raise ConfigError(
                    f"{what} that is not the model's", fix="pass the model that holds all of its parameters"
                )
        yield group, [by_id[id(each)] for each in group["params"] if id(each) in by_id]


def _read_optimizer(optimizer: torch.optim.Optimizer, shards: Mapping[str, LocalShard], name: str) -> OptimizerContent:
    if isinstance(getattr(optimizer, "optim", None), torch.optim.Optimizer):
        raise UnsupportedError(
            f"a checkpoint of {type(optimizer).__name__}",
            why="its states are spread over data ranks by a plan of its own",
            fix="shard with the fsdp axis (FsdpPolicy(zero_stage=1)), or save what each rank holds by yourself",
        )
    kind = type(optimizer)
    content = OptimizerContent(called("optimizer", name), f"{kind.__module__}.{kind.__qualname__}", {}, {}, {})
    for group, members in named_groups(optimizer, shards, name):
        given = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        options = encode_tree(given, f"{content.called}'s options", {})
        for shard in members:
            content.options[shard.name] = options
            _read_states(shard, optimizer.state.get(shard.value, {}), content)
    return content


def _read_states(shard: LocalShard, states: Mapping[str, Any], content: OptimizerContent) -> None:
    described = content.described.setdefault(shard.name, {})
    shape = local_part(shard.value).shape
    for state, value in states.items():
        what = f"{content.called}'s {state} of {shard.name}"
        if not isinstance(value, Tensor):
            inner: dict[str, Tensor] = {}
            described[state] = {"value": encode_tree(value, what, inner)}
            if inner:
                raise UnsupportedError(f"{what} holds several tensors")
            continue
        local = local_part(value).detach()
        if type(local) is not Tensor or local.dtype not in DTYPES:
            raise UnsupportedError(
                f"saving {what}, a {type(local).__name__} of {local.dtype}",
                why="its values are stored in a form of its own, which other layouts could not divide",
                fix="save the model alone, or train with an optimizer whose states are plain tensors",
            )
        dtype = str(local.dtype).removeprefix("torch.")
        if local.ndim == 0:
            described[state] = {"scalar": encode_tree(local.item(), what, {}), "dtype": dtype}
            continue
        form = "like" if local.shape == shape else "whole" if is_unsharded(shard.layout) else "ranks"
        described[state] = {form: dtype} if form == "like" else {form: dtype, "shape": list(local.shape)}
        content.tensors[shard.name, state] = local


def _plain(option: Any) -> Any:
    """Converts one-element tensors in an option to numbers, such as a learning rate for a compiled step."""
    if isinstance(option, Tensor):
        return option.item()
    return type(option)(map(_plain, option)) if type(option) in (list, tuple) else option


@dataclass(frozen=True)
class SaveInputs:
    """Everything that a save writes, on this rank. Tensors are views.

    Attributes:
        shards: parameters and persistent buffers, by canonical name.
        optimizers: by name, "" for a single one.
        values: JSON values by name: `extra`, `scheduler`, `scheduler_class`, `loss_scale`, `random`.
        random: states of this rank's random generators, by key.
        companions: on rank 0, contents of further files, by name.
    """

    shards: dict[str, LocalShard]
    optimizers: dict[str, OptimizerContent]
    values: dict[str, Any]
    tensors: dict[str, Tensor]
    random: dict[str, Tensor]
    companions: dict[str, bytes]

    def describe(self, registry: Registry) -> dict[str, str]:
        """Returns everything that must be equal on every rank, as text by name."""
        states: Any = self.values.get("scheduler")
        several = isinstance(self.values.get("scheduler_class"), Mapping)
        common = {name: common_state(each) for name, each in states.items()} if several else common_state(states)
        values = {**self.values, "scheduler": common}
        others = {name: each.layout for name, each in self.shards.items() if name not in registry.entries}
        layouts = {name: entry.layout for name, entry in registry.entries.items()} | others
        return {
            **describe_steps(registry.context),
            "optimizer": ", ".join(f"{name} {each.class_name}".lstrip() for name, each in self.optimizers.items()),
            **{name: json.dumps(value) for name, value in values.items()},
            **{key: f"{x.dtype} {list(x.shape)}, checksum {crc_of(x.cpu()):08x}" for key, x in self.tensors.items()},
            "the model's tensors": hashlib.sha256(repr(layouts).encode()).hexdigest(),
        }

    def copies(self, left_out: Collection[str]) -> Copies:
        """Returns saved parameters, and states of their shape. `left_out`: names of parameters that are not saved."""
        for shard in self.shards.values():
            if shard.entry is not None and shard.name not in left_out:
                yield shard.name, shard.entry, local_part(shard.value)
        for optimizer in self.optimizers.values():
            for (name, state), value in optimizer.tensors.items():
                entry = self.shards[name].entry
                if entry is not None and value.shape == local_part(self.shards[name].value).shape:
                    yield f"{optimizer.called}'s {state} of {name}", entry, value


def collect_inputs(
    model: nn.Module,
    registry: Registry,
    *,
    optimizer: Any,
    scheduler: Any,
    loss_scale: Mapping[str, Any] | None,
    extra: Any,
    companions: Callable[[], Mapping[str, bytes]],
) -> SaveInputs:
    """Collects everything that a save writes. Communicates nothing.

    Args:
        companions: returns further files besides the model's configuration, on rank 0.
    """
    for name, module in model.named_modules():
        if is_adapter(module) and getattr(module, "merged_adapters", None):
            raise ConfigError(f"{name} has its adapters merged into its weight", fix="call unmerge_adapter() first")
    shards = local_shards(model, registry)
    optimizers = {name: _read_optimizer(each, shards, name) for name, each in by_name(optimizer).items()}
    tensors: dict[str, Tensor] = {}
    values = {"extra": encode_tree(extra, "extra", tensors), "random": random_axes(registry.mesh)}
    states, classes = {}, {}
    for name, each in by_name(scheduler).items():
        if not callable(getattr(each, "state_dict", None)):
            raise ConfigError(f"{called('scheduler', name)} is a {type(each).__name__}, which has no state_dict")
        states[name] = encode_tree(each.state_dict(), f"scheduler.{name}".removesuffix("."), tensors)
        classes[name] = type(each).__name__
    if states:
        is_single = [*states] == [""]
        values["scheduler"], values["scheduler_class"] = (states[""], classes[""]) if is_single else (states, classes)
    if loss_scale is not None:
        values["loss_scale"] = dict(loss_scale)
    files = {**_config_files(registry.model() or model), **companions()} if registry.mesh.position == 0 else {}
    return SaveInputs(shards, optimizers, values, tensors, read_random(registry.mesh), files)


def _config_files(model: nn.Module) -> dict[str, bytes]:
    """Returns the model's configuration in transformers' format, which makes the weights a model."""
    if not isinstance(model, PreTrainedModel):
        return {}
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), config.dtype)
    configs: dict[str, Any] = {"config.json": config}
    if model.can_generate() and model.generation_config is not None:
        configs["generation_config.json"] = model.generation_config
    return {name: each.to_json_string(use_diff=True).encode() for name, each in configs.items()}
