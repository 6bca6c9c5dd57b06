"""One stage's part of a forward: what is skipped, what is replaced, and where it ends.

# [Note: a stage's forward]
A stage runs the model's own forward with the whole microbatch's arguments. Until the call of the layer with which the
stage begins, everything is foreign: parameters are absent (see [Note: absent tensors]), layers are skipped, and modules
run their own code without hooks. At that call, received tensors replace the absent ones at their anchors. From there on
the model computes, and its layers see plain tensors. At the call with which the next stage begins, the needed tensors
are collected at their anchors. The forward ends by an exception, which the model's outermost forward converts to an
ordinary return, so that hooks around the model see one.

An anchor is a string. `input:PATH`: in the arguments of the layer call at which a stage begins.
`output:FQN:NUMBER:PATH`: in the output of call NUMBER of the module FQN. `glue:CALLS:NUMBER:PATH`: in the output of
operation NUMBER, counting those on values that depend on parameters outside of all watched modules, after CALLS calls
of layers. A path joins the keys and indices that lead to a tensor by dots; it is empty for a tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from transformers.utils import ModelOutput

from shardwise.errors import LayoutError, UnsupportedError
from shardwise.plan.pipeline_plan import CutTensor
from shardwise.runtime.adapter_facts import unwrapped
from shardwise.runtime.arguments import argument_names, change_each, edited, hidden_name
from shardwise.runtime.modes import leave_mode
from shardwise.stages.absent import FACTORIES, Absent, present

_WRITING = frozenset(("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__"))
_OF_FIRST = frozenset(("type_as", "expand_as", "view_as", "reshape_as"))
_BY_SHAPE = frozenset((*FACTORIES, "new_tensor"))


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names of the module's forward; those of `*args` by their numbers."""
    names = argument_names(module)
    return {
        **{str(at): value for at, value in enumerate(args[len(names) :])},
        **dict(zip(names, args, strict=False)),
        **kwargs,
    }


def used_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors among an operation's arguments whose values it uses, not only their shapes or dtypes."""
    name = getattr(func, "__name__", "")
    if name in _BY_SHAPE:
        return []
    return [value for _, value in named_tensors(args[0] if name in _OF_FIRST else [args, kwargs])]


def made_by(func: Any, args: Any, out: Any) -> list[tuple[str, Tensor]]:
    """Returns the tensors that an operation makes or changes, with their paths in its output."""
    return [("", args[0])] if writes(func) and args else list(named_tensors(out))


def is_dropout(func: Any) -> bool:
    """Returns whether an operation randomly drops elements of its first argument."""
    return "dropout" in getattr(func, "__name__", "")


def writes(func: Any) -> bool:
    """Returns whether an operation changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor in tuples, lists and dicts, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, each in _items(value):
            yield from named_tensors(each, f"{path}.{key}" if path else str(key))


def find_tensor(value: Any, path: str) -> Tensor | None:
    """Returns the tensor at a path; None if there is none."""
    for key in path.split(".") if path else ():
        value = next((each for name, each in _items(value) if str(name) == key), None)
    return value if isinstance(value, Tensor) else None


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


if TYPE_CHECKING:
    from shardwise.stages.model import Stages


Own = Callable[..., Any]

_MAIN_OUTPUTS = ("loss", "logits", "last_hidden_state")
"""What the last stage must have computed. A request for hidden states of all stages is refused before the forward."""


@dataclass(frozen=True, kw_only=True)
class StageTensor:
    """One tensor that is sent from a stage to the next.

    Attributes:
        shape: shape of what this rank sends or receives; with sequence parallelism, of its part of the sequence.
        dtype: its dtype; with mixed precision, that of computation.
        needs_gradient: whether a gradient of the same shape and dtype is sent back.
        anchor: where it is found; see `shardwise.stages.run`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    anchor: str = ""


@dataclass(frozen=True)
class Module:
    """A watched module: its FQN, its class before the split, and whether it is a layer."""

    fqn: str
    own_class: Any
    is_layer: bool


@dataclass(frozen=True)
class Outgoing:
    """Output of a stage before the last, for hooks on the model, so that they do not take it for the model's output."""

    values: tuple[Tensor, ...]


class _StageEnd(Exception):  # noqa: N818 - no error
    """Ends the run at a cut; carries the tensors that are sent."""

    def __init__(self, outgoing: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.outgoing = outgoing


class _Glue(TorchFunctionMode):
    """Counts operations outside of watched modules on values that depend on parameters, to find their results."""

    def __init__(self, run: StageRun) -> None:
        super().__init__()
        self.run = run
        self.place = (0, 0)  # how many layers were called, and operations counted since
        self.depending: dict[int, Tensor] = {}  # kept, so that nothing else gets their ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_shared = self.run.order.shares_dropped and is_dropout(func)
        if is_shared and self.run.is_foreign and type(args[0]) is Tensor:  # another stage drops, and sends what is left
            out: Any = Absent.of(args[0].shape, args[0].dtype, args[0].device)
        else:
            out = func(*args, **(kwargs or {}))
        if self.run.depth:
            return out
        if is_shared or any(map(self._depends, used_by(func, args, kwargs))):
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
        """Records the output of a watched module that is outside of all others."""
        values = [value for _, value in named_tensors(output)]
        if self.run.measures:
            if not any(isinstance(value, Absent) for value in values):
                self.run.stages.independent.add(fqn)
        elif fqn not in self.run.stages.independent:
            self.depending |= {id(value): value for value in values}

    def left(self) -> AbstractContextManager[Any]:
        """Context manager: nothing is counted, and code may be compiled."""
        is_needed = self.run.order.shares_dropped and self.run.is_foreign
        return nullcontext() if is_needed else _pop_mode_temporarily()


class StageRun:
    """One forward of the model, of which this rank computes some segments (`ComputeRun`) or none (`MeasureRun`).

    Args:
        wanted: anchors of the tensors to find.
        skipped: number of leading segments that do not run, because the caller passes their results.
    """

    measures = False

    def __init__(self, stages: Stages, wanted: Iterable[str], *, skipped: int, is_foreign: bool) -> None:
        self.stages, self.order = stages, stages.plan.order
        self.segment = skipped  # of the next call of a layer
        self.depth = 0  # of watched modules
        self.is_foreign = is_foreign
        self.hidden = ""  # anchor of the hidden states at the cut reached last
        self.numbers: dict[str, int] = {}  # calls of modules, by their names
        self.found: dict[str, Tensor | None] = dict.fromkeys(wanted)
        self.named = {anchor.split(":")[1] for anchor in self.found if anchor.startswith("output:")}
        is_counted = self.order.shares_dropped or any(anchor.startswith("glue:") for anchor in self.found)
        self.glue = _Glue(self) if is_counted else None

    def reach_cut(self) -> tuple[Tensor, ...] | None:
        """Runs before the first layer after a cut. Returns the tensors to send if this run ends here."""
        raise NotImplementedError

    def cut_tensors(self, segment: int) -> tuple[CutTensor, ...]:
        """Returns the tensors that cross the cut before a segment."""
        return self.order.cut_tensors[segment - 1] if 0 < segment <= len(self.order.cut_tensors) else ()

    def forward(self, own: Own, args: Any, kwargs: Any) -> Any:
        """Runs the model's own forward, up to the end of this stage."""
        if self.is_foreign:
            self._hide_parameters()
        if self.glue is not None:
            self.glue.__enter__()
        try:
            output = own(*args, **kwargs)
        except _StageEnd as end:
            return Outgoing(end.outgoing)
        finally:
            if self.glue is not None:
                leave_mode(self.glue)  # a head in it may have entered another one, which goes on
        self._check_reached(len(self.order.calls))
        output = _without_absent(present(output))
        absent = [path for path, value in named_tensors(output) if isinstance(value, Absent)]
        if absent:
            raise UnsupportedError(
                f"the model returns {', '.join(absent[:3])}, which other stages compute",
                fix="ask for logits and loss only, or use pp1",
            )
        return output

    def call(self, module: nn.Module, own: Own, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of a watched module; `own` includes its hooks."""
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
            self._note_arguments(named_arguments(unwrapped(module), args, kwargs))
            outgoing = self.reach_cut()
            if outgoing is not None:
                raise _StageEnd(outgoing)
        self.segment += 1

    def _computed(self, segment: int) -> list[tuple[CutTensor, Tensor]]:
        """Returns the tensors that cross a cut in this run. The number may change with the mode and the arguments."""
        found = ((cut_tensor, self.found[cut_tensor.anchor]) for cut_tensor in self.cut_tensors(segment))
        return [(cut_tensor, value) for cut_tensor, value in found if value is not None]

    def _note_arguments(self, arguments: dict[str, Any]) -> None:
        self.hidden = f"input:{hidden_name(arguments)}"
        for anchor in self.found:
            kind, _, path = anchor.partition(":")
            if kind == "input":
                self.found[anchor] = find_tensor(arguments, path)

    def note(self, anchor: str, value: Tensor) -> None:
        """Records `value` as the tensor at this anchor."""
        if anchor in self.found:
            self.found[anchor] = value

    def _pass_through(self, module: nn.Module, known: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of a foreign module: absent tensors, and values that depend on no parameters."""
        returned, base = self.order.returns.get(known.fqn), unwrapped(module)
        if returned is None and base is not module:
            return base(*args, **kwargs)  # adapters change no shapes
        if returned is None:
            changes = self.stages.sliced.get(module)
            if changes is not None:
                names = argument_names(module)
                args, kwargs = edited(names, args, kwargs, lambda arguments: change_each(arguments, changes))
            output = known.own_class.forward(module, *args, **kwargs)
        else:
            arguments = named_arguments(base, args, kwargs)
            made = [_like(arguments, name) for name in returned.like]
            output = tuple(made) if returned.is_tuple else made[0]
        for hook in tuple(module._forward_hooks.values()):
            if getattr(hook, "__module__", "") == _CAPTURING:
                hook(module, args, output)
        return output

    def _hide_parameters(self) -> None:
        for (module, name), absent in self.stages.absent.items():
            module.__dict__[name], absent.value = absent, None

    def show_parameters(self) -> None:
        """Makes modules see the parameters that this rank holds."""
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


class ComputeRun(StageRun):
    """A stage's own forward: its segments compute, earlier ones are foreign, and it ends when the cut tensors are sent.

    Args:
        last: the segment before which it ends; None: the end of the model.
        skipped: number of leading segments that do not run, because the caller passes their results.
        travels: in such a run, anchors of the tensors sent at the cut before each segment; the rest is given.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        first: int,
        last: int | None,
        received: Sequence[Tensor],
        skipped: int = 0,
        travels: Mapping[int, frozenset[str]] | None = None,
    ) -> None:
        self.first, self.last, self.received, self.travels = first, last, received, travels
        self.order = stages.plan.order
        wanted = {cut_tensor.anchor for cut in (first, last) if cut is not None for cut_tensor in self.cut_tensors(cut)}
        super().__init__(stages, wanted, skipped=skipped, is_foreign=first > max(0, skipped - 1))

    def cut_tensors(self, segment: int) -> tuple[CutTensor, ...]:
        """Returns the tensors that cross the cut before a segment and are not passed by the caller."""
        cut_tensors = super().cut_tensors(segment)
        if self.travels is None:
            return cut_tensors
        return tuple(each for each in cut_tensors if each.anchor in self.travels.get(segment, ()))

    def reach_cut(self) -> tuple[Tensor, ...] | None:
        """Begins or ends the stage at its own cuts."""
        if self.last == self.segment:
            return tuple(present(value) for _, value in self._computed(self.segment))
        if self.first == self.segment:
            self._begin()
        return None

    def _begin(self) -> None:
        """Begins the stage's own segments: binds received tensors to the absent ones."""
        expected = self._computed(self.first)
        if len(expected) != len(self.received):
            raise _not_found(self.order.calls[self.first], len(self.received), len(expected))
        for (cut_tensor, absent), value in zip(expected, self.received, strict=True):
            if not isinstance(absent, Absent):
                raise _not_found(cut_tensor.anchor, 1, 0)
            absent.value = value.clone() if cut_tensor.is_written else value
            if cut_tensor.anchor == self.hidden:
                self._enter_stack(absent)
        for (module, name), own in self.stages.absent.items():
            own.value = module._parameters[name]  # where it was handed to this layer
        self.is_foreign = False
        self.show_parameters()

    def _enter_stack(self, hidden: Absent) -> None:
        """Begins a stage inside of a stack of layers that splits the sequence on an earlier stage."""
        stack, context = self.stages.split.get(self.first), self.stages.context
        if stack is not None and context is not None:
            context.state.open_stack = stack
            context.state.stack_rows, context.state.lengths[stack] = hidden.meta.shape[:2]


class MeasureRun(StageRun):
    """A forward that computes nothing, to find the cut tensors.

    Attributes:
        seen: tensors that cross each cut, in order.
        given: for a chain that has not run yet, the inputs of its layers after cuts, by segment.
    """

    measures = True

    def __init__(self, stages: Stages, *, skipped: int = 0) -> None:
        self.order, starts = stages.plan.order, stages.plan.starts[1:]
        wanted = {cut_tensor.anchor for start in starts for cut_tensor in self.cut_tensors(start)}
        super().__init__(stages, wanted, skipped=skipped, is_foreign=True)
        self.skipped = skipped
        self.seen: list[tuple[StageTensor, ...]] = [() for start in starts if start < skipped]
        self.given: dict[int, tuple[CutTensor, ...]] = {}

    def reach_cut(self) -> tuple[Tensor, ...] | None:
        """Records the cut tensors; ends at the last cut."""
        cut_tensor = self._computed(self.segment)
        kept = [pair for pair in cut_tensor if not self.skipped or isinstance(pair[1], Absent)]
        self.seen.append(tuple(self._travelling(*pair) for pair in kept))
        return () if self.segment == self.stages.plan.starts[-1] else None

    def _note_arguments(self, arguments: dict[str, Any]) -> None:
        if self.order.is_chain:
            absent = [path for path, value in named_tensors(arguments) if isinstance(value, Absent)]
            self.given[self.segment] = tuple(CutTensor(anchor=f"input:{path}") for path in absent)
        super()._note_arguments(arguments)

    def _travelling(self, cut_tensor: CutTensor, value: Tensor) -> StageTensor:
        shape = list(value.shape)
        context = self.stages.context
        if context is not None and self.segment in self.stages.split and cut_tensor.anchor == self.hidden:
            shape[1] = -(-shape[1] // context.tp.size)
        needs = cut_tensor.needs_gradient and value.dtype.is_floating_point
        return StageTensor(shape=tuple(shape), dtype=value.dtype, needs_gradient=needs, anchor=cut_tensor.anchor)


def _not_found(what: str, sent: int, computed: int) -> UnsupportedError:
    return UnsupportedError(
        f"at {what.replace(':', ' ')} {sent} tensors were sent, and {computed} are to take their places",
        why="the stages run differently from each other: in another mode, or with other arguments",
        fix="run all ranks in one mode (train or eval) with the same arguments, or use pp1",
    )


_CAPTURING = "transformers.utils.output_capturing"


def _like(arguments: Mapping[str, Any], name: str) -> Any:
    """Returns the replacement of a value that a module returns; see `Returned`."""
    value = arguments.get(name.removeprefix("="))
    if name.startswith("=") or not isinstance(value, Tensor):
        return value
    return Absent.of(value.shape, value.dtype, value.device)


def _without_absent(output: Any) -> Any:
    """Removes outputs of other stages that nobody asks for, such as `image_hidden_states`, from a model's output."""
    if not isinstance(output, ModelOutput):
        return output
    fields = {
        name: value
        for name, value in output.items()
        if name in _MAIN_OUTPUTS or not any(isinstance(each, Absent) for _, each in named_tensors(value))
    }
    return output if len(fields) == len(output) else type(output)(**fields)
