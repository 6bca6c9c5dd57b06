"""The stages of a pipeline as one rank runs them: the same model's forward, of which only its own segments compute.

See [Note: a stage's forward].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from shardwise.errors import LayoutError, UnsupportedError
from shardwise.plan.pipeline_plan import PipelinePlan
from shardwise.plan.structure import is_within
from shardwise.runtime.arguments import Change
from shardwise.runtime.context import SplitContext
from shardwise.runtime.modes import is_in_backward
from shardwise.stages.absent import Absent, present
from shardwise.stages.cache_copies import copy_cache
from shardwise.stages.run import ComputeRun, MeasureRun, Module, Outgoing, Own, StageRun, StageTensor

Lengths = tuple[int, ...]
"""Sizes of a forward's arguments that grow by one with every token that is generated."""

Cuts = list[tuple[StageTensor, ...]]
"""What comes into each stage, and at the end nothing."""

__all__ = ["LayerContainer", "MayHaveNoParameters", "StageAwareCall", "StageTensor", "StagedModel", "Stages"]


class StagedModel:
    """Mixin of the model: its forward is that of the stage which runs."""

    _stages: Stages

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The current stage's part; see [Note: a stage's forward]."""
        return self._stages.forward(super().forward, args, kwargs)  # type: ignore[misc]


class LayerContainer:
    """Mixin of the modules that layers are inside of: what they return is present, for whoever hooks on to them."""

    _stages: Stages

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own. Raises UnsupportedError where no stage runs: some of its layers are elsewhere."""
        run = self._stages.current
        if run is None:
            raise UnsupportedError(
                f"{type(self).__name__} is a part of a model in stages: no rank can run it alone",
                fix=f"call the {type(self._stages.model).__name__} that it is a part of",
            )
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return output if run.is_foreign else present(output)


class MayHaveNoParameters:
    """Mixin of transformers models inside of the model, which may have no parameter left that says where they are."""

    @property
    def device(self) -> torch.device:
        """That of the first parameter, here or not."""
        return _first_parameter(self).device  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """That of the first parameter, here or not."""
        return _first_parameter(self).dtype  # type: ignore[arg-type]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: FBT001, FBT002 - as torch has it
        """Those that are here; while its code runs and none is, the first one, absent: foreign code asks its dtype."""
        here = list(super().parameters(recurse))  # type: ignore[misc]
        running = getattr(self, "_stages", None) if not here else None
        return iter(here or ([_first_parameter(self)] if running and running.current else []))  # type: ignore[arg-type]


class StageAwareCall:
    """Mixin of layers and of the modules around them: their calls go through the stage that runs, if one does."""

    _stages: Stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: Own = super().__call__  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        run = self._stages.current
        if run is not None:
            return run.call(self, own, args, kwargs)  # type: ignore[arg-type]
        if not is_in_backward():  # where layers are recomputed
            raise UnsupportedError(
                f"{self._stages.modules[self].fqn} of a model in stages is called by itself",  # type: ignore[index]
                why="each rank holds the layers of its own stages, and this call says nothing to the others",
                fix="call the model, or use pp_size 1",
            )
        return own(*args, **kwargs)


@dataclass(eq=False)
class Stages:
    """The stages that a rank holds of one split model.

    Attributes:
        own: their numbers, in the order in which a microbatch passes them.
        absent: absent parameters by (module, name), of those that this rank holds and modules outside of layers own:
            they take the parameters' places where their module runs in a foreign segment.
        foreign: the name of every parameter that this rank does not hold, by (module, name in the module).
        context: what split modules share; None without tensor parallelism.
        sliced: of tensor parallelism, the inputs of watched modules of which a rank uses a part, to what cuts it out.
        split: of sequence parallelism, the segments in whose layers hidden states come in parts, to the name of their
            stack.
        independent: the watched modules that were seen to return nothing that depends on parameters.
    """

    own: tuple[int, ...]
    model: nn.Module
    plan: PipelinePlan
    modules: dict[nn.Module, Module] = field(default_factory=dict)
    absent: dict[tuple[nn.Module, str], Absent] = field(default_factory=dict)
    foreign: dict[tuple[nn.Module, str], str] = field(default_factory=dict)
    context: SplitContext | None = None
    sliced: dict[nn.Module, dict[str, Change]] = field(default_factory=dict)
    split: dict[int, str] = field(default_factory=dict)
    independent: set[str] = field(default_factory=set)
    current: StageRun | None = None
    _shapes: dict[Any, dict[Lengths, Cuts]] = field(default_factory=dict)

    def shapes(
        self, stage: int, arguments: Mapping[str, Any]
    ) -> tuple[tuple[StageTensor, ...], tuple[StageTensor, ...]]:
        """What comes into a stage and what leaves it, for a forward with these arguments; kept by their shapes.

        # [Note: lengths that grow]
        With every token that `generate()` writes, masks and caches are longer by one. What crosses a cut has the same
        shape then, or is longer by one, too (a bias of positions): two forwards of other lengths tell that of all.

        Communicates: nothing.
        """
        cuts = self._cuts(arguments)
        return cuts[stage], cuts[stage + 1]

    def _cuts(self, arguments: Mapping[str, Any]) -> Cuts:
        """What comes into each stage, and after them nothing."""
        lengths: list[int] = []
        key = self.model.training, _autocast(), _key(arguments, lengths)
        if self.plan.order.is_chain and not self.plan.order.cut_tensors:
            self._see_cuts(arguments)
        measured, at = self._shapes.setdefault(key, {}), tuple(lengths)
        if at in measured:
            return measured[at]
        cuts = _extrapolate(measured, at)
        if cuts is None:
            run = MeasureRun(self, skipped=self.num_skipped(arguments))
            given = {
                name: copy_cache(value) if isinstance(value, Cache) else value for name, value in arguments.items()
            }
            with torch.no_grad():
                self._run(run, given)
            cuts = measured[at] = [(), *run.seen, ()]
        return cuts

    def _see_cuts(self, arguments: Mapping[str, Any]) -> None:
        """Finds what crosses the cuts of a chain, which has not run before: what its layers are given."""
        order, run = self.plan.order, MeasureRun(self)
        with torch.no_grad():
            self._run(run, arguments)
        cut_tensors = tuple(run.given.get(segment, ()) for segment in range(1, len(order.calls)))
        self.plan = replace(self.plan, order=replace(order, cut_tensors=cut_tensors))

    def num_skipped(self, arguments: Mapping[str, Any]) -> int:
        """How many segments, from the first on, do not run: those of an encoder whose output is given."""
        if arguments.get("encoder_outputs") is None or not self.encoder:
            return 0
        calls = self.plan.order.calls
        return next((number for number, call in enumerate(calls) if not is_within(call, (self.encoder,))), len(calls))

    @functools.cached_property
    def encoder(self) -> str:
        """The name of the module in the model that computes `encoder_outputs`; empty where there is none."""
        is_one = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        encoder = self.model.get_encoder() if is_one and hasattr(self.model, "get_encoder") else None  # type: ignore[operator]
        return next((name for name, module in self.model.named_modules() if module is encoder), "")

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
        skipped, travels = self.num_skipped(arguments), None
        if skipped:
            if segments.stop < skipped:
                return ()
            starts = zip(self.plan.starts, self._cuts(arguments), strict=False)
            travels = {start: frozenset(each.anchor for each in cut) for start, cut in starts}
        run = ComputeRun(self, first=segments.start, last=last, received=received, skipped=skipped, travels=travels)
        _, expected = self.shapes(stage, arguments)  # before caches are written to
        output = self._run(run, arguments)
        if not isinstance(output, Outgoing):
            return output
        _check_sent(output.values, expected, self.plan.order.calls[segments.stop])
        return output.values

    def forward(self, own: Own, args: Any, kwargs: Any) -> Any:
        """The model's forward: what the current stage computes of it."""
        if self.current is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} is in stages: no rank can run its forward alone",
                fix="call the model, not its forward",
            )
        return self.current.forward(own, args, kwargs)

    def _run(self, run: StageRun, arguments: Mapping[str, Any]) -> Any:
        around, self.current = self.current, run
        try:
            return nn.Module.__call__(self.model, **arguments)
        finally:
            self.current = around
            run.show_parameters()


def _autocast() -> Any:
    """What dtypes depend on besides."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def _key(value: Any, lengths: list[int], name: str = "") -> Any:
    """What shapes depend on of an argument; the sizes that grow while tokens are generated are added to `lengths`."""
    if isinstance(value, Tensor):
        if name.endswith("attention_mask"):
            lengths.append(value.shape[-1])
            return tuple(value.shape[:-1]), value.dtype
        return tuple(value.shape), value.dtype
    if isinstance(value, Cache):
        lengths.append(value.get_seq_length() if isinstance(value, EncoderDecoderCache) else 0)
        return repr(value)
    if isinstance(value, Mapping):
        return tuple((name, _key(each, lengths, str(name))) for name, each in value.items())
    return tuple(_key(each, lengths) for each in value) if isinstance(value, list | tuple) else repr(value)


def _extrapolate(measured: Mapping[Lengths, Cuts], lengths: Lengths) -> Cuts | None:
    """The cuts at other lengths than two that were measured; None where they do not tell (see [Note: lengths that
    grow]).
    """
    if len(measured) < 2:
        return None
    (first, one), (second, other) = list(measured.items())[:2]
    steps = {(b - a, c - a) for a, b, c in zip(first, second, lengths, strict=True)} - {(0, 0)}
    if len(steps) != 1 or 0 in (step := steps.pop()):
        return None
    try:
        return [
            tuple(_grown(*pair, *step) for pair in zip(*cuts, strict=True)) for cuts in zip(one, other, strict=True)
        ]
    except ValueError:
        return None


def _grown(old: StageTensor, new: StageTensor, by: int, to: int) -> StageTensor:
    """Lengthen `old` by `to` in the dims in which `new` is longer by `by`.

    Raises:
        ValueError: they differ in anything else.
    """
    grown = [b - a for a, b in zip(old.shape, new.shape, strict=True)]
    if replace(new, shape=old.shape) != old or not {0, by}.issuperset(grown):
        raise ValueError
    return replace(old, shape=tuple(size + to * bool(each) for size, each in zip(old.shape, grown, strict=True)))


def _check_sent(values: Sequence[Tensor], expected: Sequence[StageTensor], layer: str) -> None:
    sent = [(tuple(value.shape), value.dtype) for value in values]
    if any(isinstance(value, Absent) for value in values) or sent != [(each.shape, each.dtype) for each in expected]:
        raise LayoutError(
            f"the stage that begins with {layer} expects other tensors than it is sent",
            why=f"sent: {sent}, expected: {[(each.shape, each.dtype) for each in expected]}",
            fix="convert the model before it is split (dtype=...), or use other cuts, or pp1",
        )


def _first_parameter(model: nn.Module) -> Tensor:
    """A parameter of floating-point numbers, the first one if there is one."""
    values = (value for module in model.modules() for value in (*module._parameters.values(), *vars(module).values()))
    found = (value for value in values if isinstance(value, nn.Parameter | Absent) and value.is_floating_point())
    return next(found)
