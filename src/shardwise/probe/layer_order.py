"""Finds out how a model can be cut into stages, and tries it.

A tiny model with as many layers as the model, of the same kinds, runs once and is watched. Then it runs stage by stage,
cut before every layer, and must compute the same loss and gradients. The result is cached on disk.

A tensor depends on parameters if a parameter was used to compute it. If it is made in one segment and used in a later
one, it crosses every cut between the two.
"""

import copy
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from shardwise.data.batch import is_medium
from shardwise.errors import PlanError, UnsupportedError
from shardwise.parallel.facts import read_facts
from shardwise.parallel.stages import build_local_stages
from shardwise.plan.pipeline_plan import CutTensor, LayerOrder, PipelinePlan, Returned
from shardwise.plan.structure import outermost_layers, upwards
from shardwise.probe.disk_cache import cache_path, read, write
from shardwise.probe.trial import Verdict, build_tried_model, reraise_as, verdict_of_exception
from shardwise.runtime.modes import has_dropout
from shardwise.sharding.json_form import from_json, to_json
from shardwise.stages.model import Stages
from shardwise.stages.run import is_dropout, made_by, named_arguments, named_tensors, used_by, writes
from shardwise.tiny.inputs import add_media, clone_batch, loss_or_surrogate, make_batch
from shardwise.tiny.models import fork_all_rng, set_runnable_mode


def _watch_order(
    tiny: nn.Module, batch: Mapping[str, Any], layers: Collection[str], *, drops: bool
) -> tuple[LayerOrder, dict[str, Returned]]:
    """Runs a tiny model once; returns the layer order, and all modules' outputs that look like their arguments.

    The dropout of a tensor that depends on no parameters crosses cuts too if later segments use it: one stage draws,
    and the others receive the result.
    """
    model = _untied(tiny)
    watcher = _watched(model, batch, layers, shares_dropped=False)
    if drops and watcher.dropped_for_later:
        watcher = _watched(model, batch, layers, shares_dropped=True)
    return watcher.found()


def _watched(
    model: nn.Module, batch: Mapping[str, Any], layers: Collection[str], *, shares_dropped: bool
) -> "_Watcher":
    watcher = _Watcher(model, layers, shares_dropped=shares_dropped)
    with watcher.hooked(), watcher:
        output = model(**clone_batch(batch))
        watcher.use(value for path, value in named_tensors(output) if not (layers and is_medium(path)))
    return watcher


@dataclass(eq=False)
class _Value:
    """A tensor that depends on parameters."""

    tensor: Tensor  # kept, so that nothing else gets its id
    number: int  # of such tensors before it
    born: int  # the segment that made it
    used: int  # the last segment that used it
    anchor: str = ""  # where it is found, once that is known
    place: str = ""  # what made it, for errors
    count: int = 0  # of its uses
    written: int = -1  # the last segment that changed it in place


@dataclass(eq=False)
class _Call:
    fqn: str
    number: int
    arguments: dict[str, Any]
    given: frozenset[int]  # the tensors in them
    before: int  # values that were known when it began


class _Watcher(TorchFunctionMode):
    def __init__(self, model: nn.Module, layers: Collection[str], *, shares_dropped: bool) -> None:
        super().__init__()
        self.model = model
        self.layers = set(layers or outermost_layers(read_facts(model).stacks))
        self.shares_dropped = shares_dropped
        self.around = {""} | {name.rpartition(".")[0] for layer in self.layers for name in upwards(layer)}
        self.parameters = {id(value): name for name, value in model.named_parameters(remove_duplicate=False)}
        self.calls: list[str] = []
        self.uses: dict[str, set[int]] = {}
        self.values: dict[int, _Value] = {}
        self.entries: list[dict[int, str]] = []  # for every segment, the tensors in its layer's arguments
        self.stack: list[_Call] = []
        self.numbers: dict[str, int] = {}
        self.returned: dict[str, list[tuple[bool, list[str | tuple[int, int] | None]]]] = {}
        self.num_glue = 0
        self.dropped: dict[int, tuple[Tensor, int]] = {}  # what depends on no parameters, and its segment
        self.dropped_for_later = False

    @property
    def segment(self) -> int:
        return max(0, len(self.calls) - 1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        used = used_by(func, args, kwargs)
        given = [value for value in used if self._depends(value)]
        self._use_dropped(used)
        is_shared = self.shares_dropped and not given and is_dropout(func)
        if not given and not is_shared:
            self._note_dropped(func, args, used, out)
            return out
        made = made_by(func, args, out)
        if made or name in _READING:
            self.use(given)
        if writes(func) and args:
            base = args[0] if args[0]._base is None else args[0]._base
            for value in (args[0], base):
                if id(value) in self.values:
                    self.values[id(value)].written = self.segment
        in_glue = not self.stack
        anchor = f"glue:{len(self.calls)}:{self.num_glue}:" if in_glue else ""
        place = f"{name} in {self.stack[-1].fqn if self.stack else 'the model'}"
        for path, value in made:
            if is_shared or not self._depends(value) or (value.requires_grad and id(value) not in self.values):
                self._add(value, f"{anchor}{path}" if in_glue else "", place)
        self.num_glue += in_glue and bool(made)
        return out

    def _note_dropped(self, func: Any, args: Any, used: Iterable[Tensor], out: Any) -> None:
        """Records dropout of a tensor that depends on no parameters, and results computed from it."""
        known = next((self.dropped[id(value)][1] for value in used if id(value) in self.dropped), None)
        if known is not None or is_dropout(func):
            segment = self.segment if known is None else known
            self.dropped |= {id(value): (value, segment) for _, value in made_by(func, args, out)}

    def _use_dropped(self, values: Iterable[Tensor]) -> None:
        self.dropped_for_later |= any(
            self.dropped[id(value)][1] < self.segment for value in values if id(value) in self.dropped
        )

    def _depends(self, value: Tensor) -> bool:
        return id(value) in self.values or id(value) in self.parameters or value.requires_grad

    def _add(self, value: Tensor, anchor: str, place: str) -> _Value:
        known = _Value(value, len(self.values), self.segment, self.segment, anchor, place)
        return self.values.setdefault(id(value), known)

    def use(self, values: Any) -> None:
        """Records that the current segment computes with these tensors."""
        for value in values:
            if id(value) in self.parameters:
                self.uses.setdefault(self.parameters[id(value)], set()).add(self.segment)
            elif id(value) in self.values:
                known = self.values[id(value)]
                known.used = max(known.used, self.segment)
                known.count += 1

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context manager: records calls of modules."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if name in self.around:
                    continue
                enter, leave = as_hook(self._enter, name), as_hook(self._leave, name)
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
                stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            yield

    def _enter(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        number = self.numbers[fqn] = self.numbers.get(fqn, -1) + 1
        arguments = named_arguments(module, args, kwargs)
        tensors = list(named_tensors(arguments))
        if fqn in self.layers:
            if any(call.fqn in self.layers for call in self.stack):
                raise PlanError(f"{type(self.model).__name__} runs {fqn} inside of {self.stack[-1].fqn}")
            self.calls.append(fqn)
            self.num_glue = 0
            self.entries.append({id(value): path for path, value in reversed(tensors)})
            self.use(value for _, value in tensors)
            self._use_dropped(value for _, value in tensors)
        given = frozenset(id(value) for _, value in tensors)
        self.stack.append(_Call(fqn, number, arguments, given, len(self.values)))

    def _leave(self, fqn: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self.stack.pop()
        for path, value in named_tensors(output):
            if not self._depends(value) or id(value) in self.parameters:
                continue
            known = self.values.get(id(value)) or self._add(value, "", fqn)
            if not known.anchor or (not self.stack and known.number >= call.before):
                known.anchor = f"output:{fqn}:{call.number}:{path}"
        self._note_returned(call, output)

    def _note_returned(self, call: _Call, output: Any) -> None:
        after = (value for _, value in named_tensors(call.arguments) if self._depends(value))
        if any(id(value) not in call.given for value in after):  # it puts tensors into its arguments
            self.returned.setdefault(call.fqn, []).append((False, [None]))
            return
        is_tuple = type(output) is tuple
        like = [self._like(call.arguments, value) for value in (output if is_tuple else (output,))]
        self.returned.setdefault(call.fqn, []).append((is_tuple, like))

    def _like(self, arguments: Mapping[str, Any], value: Any) -> str | tuple[int, int] | None:
        """Description of a value, see `Returned`; else its number and use count; None if it is nothing known."""
        if value is None:
            return ""
        if not isinstance(value, Tensor):
            return None
        same = next((f"={name}" for name, given in arguments.items() if given is value), None)
        if same is not None or not self._depends(value):
            return same
        given = ((name, each) for name, each in arguments.items() if isinstance(each, Tensor))
        name = next((name for name, each in given if (each.shape, each.dtype) == (value.shape, value.dtype)), None)
        return (id(value), self.values[id(value)].count) if name is None and id(value) in self.values else name

    def _returns(self) -> dict[str, Returned]:
        """Returns the outputs of modules that look the same in all calls; without those that are never used."""
        found: dict[str, Returned] = {}
        for fqn, calls in self.returned.items():
            distinct = {(is_tuple, tuple(map(self._if_used, like))) for is_tuple, like in calls}
            (is_tuple, like), *others = distinct
            names = tuple(name for name in like if name is not None)
            if not others and len(names) == len(like):
                found[fqn] = Returned(like=names, is_tuple=is_tuple)
        return found

    def _if_used(self, like: str | tuple[int, int] | None) -> str | None:
        if not isinstance(like, tuple):
            return like
        key, count = like
        return None if self.values[key].count > count else ""

    def found(self) -> tuple[LayerOrder, dict[str, Returned]]:
        """Returns the results of `watch_order`."""
        if not self.calls:
            raise PlanError(
                f"{type(self.model).__name__} cannot be cut into stages",
                why="no module ran of those that look like its layers",
                fix="use pp1",
            )
        cut_tensors = tuple(self._crossings(segment) for segment in range(1, len(self.calls)))
        anchors = [each.anchor.split(":") for cut in cut_tensors for each in cut]
        sent = {fqn for kind, fqn, *_ in anchors if kind == "output" and fqn not in self.layers}
        holding = {around for fqn in sent for around in upwards(fqn)}  # their code must run
        returns = {name: each for name, each in self._returns().items() if name not in holding}
        names = self.model.named_parameters(remove_duplicate=False)
        order = LayerOrder(
            calls=tuple(self.calls),
            uses={name: tuple(sorted(self.uses.get(self.parameters[id(value)], ()))) for name, value in names},
            cut_tensors=cut_tensors,
            returns={name: each for name, each in returns.items() if name in self.layers},
            shares_dropped=self.shares_dropped,
        )
        return order, returns

    def _crossings(self, segment: int) -> tuple[CutTensor, ...]:
        found: dict[str, CutTensor] = {}
        entry = self.entries[segment]
        for key, value in self.values.items():
            if not value.born < segment <= value.used:
                continue
            anchor = f"input:{entry[key]}" if key in entry else value.anchor
            if not anchor:
                raise PlanError(
                    f"{type(self.model).__name__} cannot be cut before {self.calls[segment]}",
                    at=value.place,
                    why="what is computed there, inside of a layer, is used after it without having been returned",
                    fix="use pp1",
                )
            found[anchor] = CutTensor(
                anchor=anchor, needs_gradient=value.tensor.requires_grad, is_written=value.written >= segment
            )
        return tuple(found.values())


_READING = frozenset(
    ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal")
)


def as_hook(method: Callable[..., Any], fqn: Any) -> Callable[..., Any]:
    """Returns a function that calls `method` with `fqn` first; a copy of a module shares it, as it does functions."""
    return lambda *given: method(fqn, *given)


def _untied(model: nn.Module) -> nn.Module:
    """Returns a copy in which every module has parameters of its own, so that each use has one name."""
    copied = copy.deepcopy(model)
    seen: set[int] = set()
    for module in copied.modules():
        for name, value in module._parameters.items():
            if value is None:
                continue
            own = nn.Parameter(value.detach().clone()) if id(value) in seen else value
            own.requires_grad_(own.is_floating_point())
            module._parameters[name] = own
            seen.add(id(own))
    return copied


logger = logging.getLogger("shardwise.plan")

_ALLOWED = 1e-3  # of the largest entry of a gradient


def find_layer_order(model: nn.Module) -> LayerOrder:
    """Returns the layers of `model` in order of execution, the tensors between them, and each parameter's users."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{name} is no transformers model", why="no tiny model of it can be built")
    path = cache_path(model, "layers", {})
    if (cached := read(path, functools.partial(from_json, LayerOrder))) is not None:
        return cached
    with reraise_as(no_stages_because(name)), fork_all_rng(), torch.enable_grad():
        tiny = build_tried_model(model, num_layers=None)  # as deep as the model
        batch = make_batch(tiny, seed=0)
        set_runnable_mode(tiny, batch)
        order = tried_order(tiny, batch, drops=has_dropout(model))
        with suppress(Exception):  # else a stage says what it lacks when it is given images or sound
            if (media := add_media(tiny, batch, seed=0)).keys() != batch.keys():
                beside = tried_order(tiny, media, layers=order.calls, drops=has_dropout(model))
                both = ((*a, *b) for a, b in zip(order.cut_tensors, beside.cut_tensors, strict=True))
                cuts = (tuple({each.anchor: each for each in cut}.values()) for cut in both)
                order = replace(beside, cut_tensors=tuple(cuts))
    write(path, to_json(order))
    return order


def tried_order(tiny: nn.Module, batch: Mapping[str, Any], *, layers: Collection[str] = (), drops: bool) -> LayerOrder:
    """Finds the layer order on a tiny model, and proves that the model computes the same when it is cut accordingly.

    Args:
        layers: the modules at which to cut; default: the outermost layers.
        drops: whether the large model has dropout, whose masks a cut must not change.

    Raises:
        PlanError: the model computes something else, or cannot be cut.
    """
    order, returns = _watch_order(tiny, batch, layers, drops=drops)
    if len(order.calls) == 1:
        raise no_stages(type(tiny).__name__, f"of its layers only {order.calls[0]} runs", at="")
    while True:
        try:
            reason, at = _difference(tiny, batch, order), ""
            if not reason:
                _check_training(tiny, batch, order)
        except Exception as error:  # noqa: BLE001 - the model's own code fails in any way on a wrong cut
            verdict = verdict_of_exception(error)
            reason, at = verdict.reason, verdict.module
        more = _returns_around(tiny, at, order, returns)
        if not more:
            break
        order = replace(order, returns={**order.returns, **more})
    if reason:
        raise no_stages(type(tiny).__name__, reason, at=at)
    return order


def _check_training(tiny: PreTrainedModel, batch: Mapping[str, Any], order: LayerOrder) -> None:
    """Runs the code of other stages in training mode, if the model can be trained; raises what a stage would raise."""
    if tiny.training:
        return
    trained = copy.deepcopy(tiny).train()
    try:
        with torch.no_grad():
            copy.deepcopy(trained)(**clone_batch(batch))
    except Exception:  # noqa: BLE001 - it wants other inputs to train
        return
    _stages_of_one(trained, order).shapes(0, clone_batch(batch))


def _stages_of_one(model: nn.Module, order: LayerOrder) -> Stages:
    """Returns all stages in one model, one per segment, in place."""
    starts = tuple(range(len(order.calls)))
    return build_local_stages(
        model, PipelinePlan(order=order, schedule="1f1b", starts=starts, rank_of=starts), own=starts
    )


def train_in_stages(stages: Sequence[Stages], batch: Mapping[str, Any]) -> tuple[Any, list[tuple[Tensor, ...]]]:
    """Runs forward and backward through all stages; returns the last one's output, and the tensors at every cut."""
    sent: list[tuple[Tensor, ...]] = []
    received: list[tuple[Tensor, ...]] = [()]
    output: Any = None
    for stage, each in enumerate(stages):
        output = each.run(stage, clone_batch(batch), received[-1])
        if stage < len(stages) - 1:
            expected, _ = stages[stage + 1].shapes(stage + 1, clone_batch(batch))
            sent.append(output)
            pairs = zip(output, expected, strict=True)
            received.append(tuple(value.detach().requires_grad_(known.needs_gradient) for value, known in pairs))
    loss_or_surrogate(output).backward()
    for values, copies in zip(reversed(sent), reversed(received), strict=False):
        given = [(x, y.grad) for x, y in zip(values, copies, strict=True) if x.requires_grad and y.grad is not None]
        torch.autograd.backward([x for x, _ in given], [gradient for _, gradient in given])
    return output, sent


def _returns_around(
    tiny: nn.Module, at: str, order: LayerOrder, returns: Mapping[str, Returned]
) -> dict[str, Returned]:
    """Returns the module in `returns` whose code failed, or one around it, and all modules of that class."""
    for name in upwards(at):
        if name in order.returns:
            break
        if name in returns:
            same = type(tiny.get_submodule(name))
            return {other: each for other, each in returns.items() if type(tiny.get_submodule(other)) is same}
    return {}


def no_stages_because(name: str) -> Callable[[Verdict], PlanError]:
    return lambda verdict: no_stages(name, verdict.reason, at=verdict.module)


def no_stages(name: str, why: str, *, at: str, fix: str = "use pp1") -> PlanError:
    return PlanError(f"{name} cannot be cut into stages", at=at or None, why=why, fix=fix)


def _difference(tiny: nn.Module, batch: Mapping[str, Any], order: LayerOrder) -> str:
    """Returns the difference of a tiny model's results when it is cut before every layer, in words."""
    unsplit, cut = copy.deepcopy(tiny), copy.deepcopy(tiny)
    own = list(cut.parameters())  # before they go
    loss = loss_or_surrogate(unsplit(**clone_batch(batch)))
    loss.backward()
    output, _ = train_in_stages([_stages_of_one(cut, order)] * len(order.calls), batch)
    found = loss_or_surrogate(output)
    if not abs(float(found.detach() - loss.detach())) <= _ALLOWED * max(1.0, abs(float(loss.detach()))):
        return f"cut before every layer, it computes a loss of {float(found):.6f} instead of {float(loss):.6f}"
    used = {id(each) for name, each in unsplit.named_parameters(remove_duplicate=False) if order.uses[name]}
    for (name, parameter), same in zip(unsplit.named_parameters(), own, strict=True):
        if not _equal(same.grad, parameter.grad):
            return f"cut before every layer, it computes another gradient of {name}"
        if id(parameter) not in used and parameter.grad is not None and bool(parameter.grad.any()):
            return f"nothing was seen to compute with {name}, but it has a gradient"
    return ""


def _equal(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return not any(bool(other.any()) for other in (found, expected) if other is not None)
    return not found.numel() or bool((found - expected).abs().max() <= _ALLOWED * expected.abs().max() + 1e-6)
