"""The stages of a pipeline as one rank runs them: the same model's forward, of which only its own segments compute.

# [Note: a stage's forward]
A stage is a run of the model's own forward, with the whole batch's arguments. Until the call of a layer with which the
stage begins, everything is foreign: parameters are absent (see [Note: absent tensors]), layers are passed through,
modules run as their classes wrote them, without hooks. At that call the tensors that were received take the place of
the absent ones at their anchors; from there on the model computes, and its own layers see plain tensors. At the call
with which the next stage begins, what it needs is collected at its anchors, and the forward ends by an exception that
the model's outermost forward turns into an ordinary return, so that hooks around the model see one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from shardwise.errors import LayoutError, UnsupportedError
from shardwise.plan.pipeline_plan import Crossing, PipelinePlan
from shardwise.runtime.absent import Absent, present
from shardwise.runtime.anchors import find_tensor, made_by, named_arguments, named_tensors

__all__ = ["Stages", "Travelling"]

Own = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Travelling:
    """One tensor that is sent from a stage to the next.

    Attributes:
        shape: of what this rank sends or receives: its part of the sequence, under sequence parallelism.
        dtype: under mixed precision that of the computation.
        needs_gradient: whether a gradient of the same shape and dtype comes back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


class Staged:
    """Mixin of the model: its forward is that of the stage which runs."""

    _stages: Stages

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The current stage's part; see [Note: a stage's forward]."""
        return self._stages.forward(super().forward, args, kwargs)  # type: ignore[misc]


class Watched:
    """Mixin of layers and of the modules around them: their calls go through the stage that runs, if one does."""

    _stages: Stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._stages.current
        own: Own = super().__call__  # type: ignore[misc]
        return own(*args, **kwargs) if run is None else run.call(self, own, args, kwargs)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Module:
    """What is known of a watched module: its name, its class and the segments of its calls if it is a layer."""

    fqn: str
    own_class: Any
    is_layer: bool


@dataclass(eq=False)
class Stages:
    """The stages that a rank holds of one split model.

    Attributes:
        own: their numbers, in the order in which a microbatch passes them.
        model: the split model.
        plan: how it is cut.
        modules: the watched modules.
        absent: absent parameters by (module, name), of those that this rank holds and modules outside of layers own:
            they take the parameters' places where their module runs in a foreign segment.
        independent: the watched modules that were seen to return nothing that depends on parameters.
        current: the stage that runs.
    """

    own: tuple[int, ...]
    model: nn.Module
    plan: PipelinePlan
    modules: dict[nn.Module, Module] = field(default_factory=dict)
    absent: dict[tuple[nn.Module, str], Absent] = field(default_factory=dict)
    independent: set[str] = field(default_factory=set)
    current: _Run | None = None
    _shapes: dict[Any, list[tuple[Travelling, ...]]] = field(default_factory=dict)

    def shapes(self, stage: int, arguments: Mapping[str, Any]) -> tuple[tuple[Travelling, ...], tuple[Travelling, ...]]:
        """What comes into a stage and what leaves it, for a forward with these arguments; kept by their shapes.

        Communicates: nothing.
        """
        key = tuple(
            (name, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (name, repr(value))
            for name, value in arguments.items()
        )
        if key not in self._shapes:
            run = _Run(self, first=len(self.plan.order.calls), last=self.plan.starts[-1], received=())
            with torch.no_grad():
                self._run(run, arguments)
            self._shapes[key] = [(), *run.seen, ()]
        cuts = self._shapes[key]
        return cuts[stage], cuts[stage + 1]

    def run(self, stage: int, arguments: Mapping[str, Any], received: Sequence[Tensor]) -> tuple[Tensor, ...] | Any:
        """Runs one stage's part of the model's forward.

        Args:
            arguments: of the model's forward, the same for every stage.
            received: what the stage before sent, in the order of `shapes`; nothing for the first stage.

        Returns:
            What the next stage is sent, in the order of `shapes`; of the last stage, the model's output.

        Raises:
            LayoutError: other layers run than those that were seen when the model was cut.
            UnsupportedError: what is needed of another stage was not sent, because it is asked for in this run alone.

        Communicates: what the stage's own layers do over tp and the data axes; nothing over pp.
        """
        segments = self.plan.segments(stage)
        last = None if stage == self.plan.num_stages - 1 else segments.stop
        run = _Run(self, first=segments.start, last=last, received=received)
        return self._run(run, arguments)

    def forward(self, own: Own, args: Any, kwargs: Any) -> Any:
        """The model's forward: what the current stage computes of it."""
        if self.current is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} is in stages: no rank can run its forward alone",
                fix="call the model, not its forward",
            )
        return self.current.forward(own, args, kwargs)

    def _run(self, run: _Run, arguments: Mapping[str, Any]) -> Any:
        around, self.current = self.current, run
        try:
            return nn.Module.__call__(self.model, **arguments)
        finally:
            self.current = around
            run.show_parameters()


class _StageEnd(Exception):  # noqa: N818 - no error
    """The stage that runs has reached the layer with which the next one begins."""


class _Glue(TorchFunctionMode):
    """Counts the operations around layers and modules on what depends on parameters, to find what they make."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run
        self.place = (0, 0)  # how many layers were called, and operations counted since
        self.depending: dict[int, Tensor] = {}  # kept, so that nothing else gets their ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(self._depends(value) for _, value in named_tensors([args, kwargs])):
            made = made_by(func, args, out)
            calls, number = self.place if self.place[0] == self.run.segment else (self.run.segment, 0)
            for path, value in made:
                self.depending[id(value)] = value
                self.run.note(f"glue:{calls}:{number}:{path}", value)
            self.place = calls, number + bool(made)
        return out

    def _depends(self, value: Tensor) -> bool:
        return isinstance(value, Absent | nn.Parameter) or value.requires_grad or id(value) in self.depending

    def note_returned(self, fqn: str, output: Any) -> None:
        """A watched module, outside of all others, has returned."""
        values = [value for _, value in named_tensors(output)]
        if self.run.measures:
            if not any(isinstance(value, Absent) for value in values):
                self.run.stages.independent.add(fqn)
        elif fqn not in self.run.stages.independent:
            self.depending |= {id(value): value for value in values}

    def left(self) -> AbstractContextManager[Any]:
        """Inside, nothing is counted, and code may be compiled."""
        return _pop_mode_temporarily()


class _Run:
    """One forward of one stage.

    Args:
        first: the segment with which it begins; above all of them where nothing is to be computed.
        last: the segment before which it ends; None where it runs to the end of the model.
    """

    def __init__(self, stages: Stages, *, first: int, last: int | None, received: Sequence[Tensor]) -> None:
        self.stages, self.order = stages, stages.plan.order
        self.first, self.last, self.received = first, last, received
        self.segment = 0  # of the next call of a layer
        self.depth = 0  # of watched modules
        self.is_foreign = first > 0
        self.outgoing: tuple[Tensor, ...] = ()
        self.seen: list[tuple[Travelling, ...]] = []  # at every cut, of a run that computes nothing
        self.numbers: dict[str, int] = {}
        wanted = {crossing.anchor for at in (first, last) for crossing in self.crossings(at)}
        self.measures = first >= len(self.order.calls)
        if self.measures:
            wanted = {each.anchor for start in stages.plan.starts[1:] for each in self.crossings(start)}
        self.found: dict[str, Tensor | None] = dict.fromkeys(wanted)
        self.named = {anchor.split(":")[1] for anchor in wanted if anchor.startswith("output:")}
        self.glue = _Glue(self) if any(anchor.startswith("glue:") for anchor in wanted) else None

    def crossings(self, segment: int | None) -> tuple[Crossing, ...]:
        """What crosses the cut in front of a segment."""
        return self.order.crossings[segment - 1] if segment and segment <= len(self.order.crossings) else ()

    def forward(self, own: Own, args: Any, kwargs: Any) -> Any:
        """The model's own forward, as far as this stage goes."""
        if self.is_foreign:
            self._hide_parameters()
        try:
            with self.glue or nullcontext():
                output = own(*args, **kwargs)
        except _StageEnd:
            return self.outgoing
        self._check_reached(len(self.order.calls))
        output = present(output)
        absent = [path for path, value in named_tensors(output) if isinstance(value, Absent)]
        if absent:
            raise UnsupportedError(
                f"the model returns {', '.join(absent[:3])}, which other stages compute",
                fix="ask for logits and loss only, or use pp1",
            )
        return output

    def call(self, module: nn.Module, own: Own, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a watched module, `own` with its hooks."""
        known = self.stages.modules[module]
        if known.is_layer and not self.depth:
            self._enter_segment(known.fqn, module, args, kwargs)
        if not self.is_foreign and not self.depth:
            args, kwargs = present(args), present(kwargs)
        self.depth += 1
        try:
            with self.glue.left() if self.glue is not None and self.depth == 1 else nullcontext():
                output = self._pass_through(module, known, args, kwargs) if self.is_foreign else own(*args, **kwargs)
        finally:
            self.depth -= 1
        if self.glue is not None and not self.depth:
            self.glue.note_returned(known.fqn, output)
        if known.fqn in self.named:
            number = self.numbers[known.fqn] = self.numbers.get(known.fqn, -1) + 1
            for path, value in named_tensors(output):
                self.note(f"output:{known.fqn}:{number}:{path}", value)
        return output

    def _enter_segment(self, fqn: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.segment >= len(self.order.calls) or self.order.calls[self.segment] != fqn:
            self._check_reached(self.segment, fqn)
        if self.segment in self.stages.plan.starts[1:]:
            self._note_arguments(module, args, kwargs)
            if self.measures or self.last == self.segment:
                self._leave()
            if self.first == self.segment:
                self._begin()
        self.segment += 1

    def _begin(self) -> None:
        """The stage's own segments begin: what was received takes the place of what is absent."""
        for crossing, value in zip(self.crossings(self.first), self.received, strict=True):
            absent = self.found[crossing.anchor]
            assert isinstance(absent, Absent), crossing
            absent.bind(value)
        self.is_foreign = False
        self.show_parameters()

    def _leave(self) -> None:
        """A cut: what crosses it is collected, and this stage ends if it is its own."""
        crossings = self.crossings(self.segment)
        values = [self.found[crossing.anchor] for crossing in crossings]
        if self.measures:
            self.seen.append(tuple(map(_travelling, crossings, values)))
        if self.last == self.segment:
            self.outgoing = tuple(present(value) for value in values)
            raise _StageEnd

    def _note_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = named_arguments(module, args, kwargs)
        for anchor in self.found:
            kind, _, path = anchor.partition(":")
            if kind == "input":
                self.found[anchor] = find_tensor(arguments, path)

    def note(self, anchor: str, value: Tensor) -> None:
        """`value` is what is found at this anchor."""
        if anchor in self.found:
            self.found[anchor] = value

    def _pass_through(self, module: nn.Module, known: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a foreign module returns: absent tensors, and what depends on no parameters."""
        returned = self.order.returns.get(known.fqn)
        if returned is None:
            output = known.own_class.forward(module, *args, **kwargs)
        else:
            arguments = named_arguments(module, args, kwargs)
            made = [_like(arguments, name) for name in returned.like]
            output = tuple(made) if returned.is_tuple else made[0]
        for hook in tuple(module._forward_hooks.values()):
            if getattr(hook, "__module__", "") == _CAPTURING:
                hook(module, args, output)
        return output

    def _hide_parameters(self) -> None:
        for (module, name), absent in self.stages.absent.items():
            module.__dict__[name] = absent

    def show_parameters(self) -> None:
        """Parameters that this rank holds are those that modules see."""
        for module, name in self.stages.absent:
            module.__dict__.pop(name, None)

    def _check_reached(self, segment: int, fqn: str | None = None) -> None:
        if fqn is None and self.segment == segment:
            return
        expected = self.order.calls[self.segment] if self.segment < len(self.order.calls) else "no layer"
        raise LayoutError(
            f"{fqn or 'the end of the model'} runs where {expected} did when the model was cut into stages",
            why="all layers must run, always in the same order (none skipped at random, or left out)",
            fix="set layerdrop to 0, or use pp1",
        )


_CAPTURING = "transformers.utils.output_capturing"


def _like(arguments: Mapping[str, Any], name: str) -> Any:
    """What stands for a value that a module returns, see `Returned`."""
    value = arguments.get(name.removeprefix("="))
    if name.startswith("=") or not isinstance(value, Tensor):
        return value
    return Absent.of(value.shape, value.dtype, value.device)


def _travelling(crossing: Crossing, value: Tensor | None) -> Travelling:
    assert value is not None, crossing
    return Travelling(shape=tuple(value.shape), dtype=value.dtype, needs_gradient=crossing.needs_gradient)
