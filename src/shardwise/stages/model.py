"""One rank's pipeline stages: the model's own forward, of which its segments compute; see [Note: a stage's forward]."""

import copy
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
from shardwise.stages.run import ComputeRun, MeasureRun, Module, Outgoing, Own, StageRun, StageTensor

Lengths = tuple[int, ...]  # sizes of a forward's arguments that grow by one with every token that is generated

Cuts = list[tuple[StageTensor, ...]]  # what comes into each stage, and at the end nothing


class StagedModel:
    """Mixin of the model: its forward is that of the running stage."""

    _stages: "Stages"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the current stage's part; see [Note: a stage's forward]."""
        return self._stages.forward(super().forward, args, kwargs)  # type: ignore[misc]


class LayerContainer:
    """Mixin of the modules that contain layers: their outputs are real tensors, for hooks."""

    _stages: "Stages"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward. Raises UnsupportedError if no stage runs: others hold some of its layers."""
        run = self._stages.current
        if run is None:
            raise UnsupportedError(
                f"{type(self).__name__} is a part of a model in stages: no rank can run it alone",
                fix=f"call the {type(self._stages.model).__name__} that it is a part of",
            )
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return output if run.is_foreign else present(output)


class MayHaveNoParameters:
    """Mixin of transformers models inside of the model that may have no parameter to read device or dtype from."""

    @property
    def device(self) -> torch.device:
        """Device of the first parameter, here or on another stage."""
        return _first_parameter(self).device  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's first parameter, even if another stage holds it. Communicates nothing."""
        return _first_parameter(self).dtype  # type: ignore[arg-type]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: FBT001, FBT002 - as torch has it
        """Yields this rank's parameters; without any, while the module's code runs, the first absent one."""
        here = list(super().parameters(recurse))  # type: ignore[misc]
        running = getattr(self, "_stages", None) if not here else None
        return iter(here or ([_first_parameter(self)] if running and running.current else []))  # type: ignore[arg-type]


class StageAwareCall:
    """Mixin of layers and the modules around them: calls go through the running stage, if there is one."""

    _stages: "Stages"

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
                why="each rank holds the layers of its own stages, and the others take no part in this call",
                fix="call the model, or use pp_size 1",
            )
        return own(*args, **kwargs)


@dataclass(eq=False)
class Stages:
    """The stages of one split model on this rank.

    Attributes:
        own: numbers of its stages, in the order in which a microbatch passes them.
        absent: absent parameters by (module, name), for parameters that this rank holds outside of layers. They replace
            the parameters if their module runs in another stage's segment.
        foreign: FQN of every parameter that this rank does not hold, by (module, name in the module).
        context: state shared by split modules; None without tensor parallelism.
        sliced: inputs of watched modules of which a tp rank uses a part, to the function that slices them.
        split: segments whose layers receive parts of the sequence, to the name of their stack.
        independent: watched modules whose output depends on no parameters.
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
        """Returns the tensors that enter and leave a stage in a forward with these arguments; cached by shapes.

        # [Note: lengths that grow]
        With every token that `generate()` writes, masks and caches grow by one. Tensors at a cut keep their shape, or
        grow by one too (a bias of positions). So forwards at two lengths determine the shapes at all lengths.

        Communicates: nothing.
        """
        cuts = self._cuts(arguments)
        return cuts[stage], cuts[stage + 1]

    def _cuts(self, arguments: Mapping[str, Any]) -> Cuts:
        """Returns the tensors that enter each stage; the last entry is empty."""
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
        """Finds the cut tensors of a chain that has not run yet: the inputs of its layers."""
        order, run = self.plan.order, MeasureRun(self)
        with torch.no_grad():
            self._run(run, arguments)
        cut_tensors = tuple(run.given.get(segment, ()) for segment in range(1, len(order.calls)))
        self.plan = replace(self.plan, order=replace(order, cut_tensors=cut_tensors))

    def num_skipped(self, arguments: Mapping[str, Any]) -> int:
        """Returns the number of leading segments that do not run: those of an encoder whose output is given."""
        if arguments.get("encoder_outputs") is None or not self.encoder:
            return 0
        calls = self.plan.order.calls
        return next((number for number, call in enumerate(calls) if not is_within(call, (self.encoder,))), len(calls))

    @functools.cached_property
    def encoder(self) -> str:
        """FQN of the module that computes `encoder_outputs`; "" if there is none."""
        is_one = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        encoder = self.model.get_encoder() if is_one and hasattr(self.model, "get_encoder") else None  # type: ignore[operator]
        return next((name for name, module in self.model.named_modules() if module is encoder), "")

    def run(self, stage: int, arguments: Mapping[str, Any], received: Sequence[Tensor]) -> tuple[Tensor, ...] | Any:
        """Runs one stage's part of the model's forward.

        Args:
            received: tensors from the previous stage, in the order of `shapes`; empty for the first stage.

        Returns:
            Tensors for the next stage, in the order of `shapes`; for the last stage, the model's output.

        Communicates: what the stage's layers do over tp and the data axes; nothing over pp.
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
        """Runs the model's forward, as far as the current stage computes it."""
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
    """Returns the autocast state, on which dtypes depend."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def _key(value: Any, lengths: list[int], name: str = "") -> Any:
    """Returns an argument's cache key: all that shapes depend on. Adds sizes that grow in generation to `lengths`."""
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
    """Cut tensors at other lengths than the measured ones; None if unknown (see [Note: lengths that grow])."""
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
    """Extends `old` by `to` in the dims in which `new` is longer by `by`."""
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
    """Returns the first floating-point parameter, else the first parameter."""
    values = (value for module in model.modules() for value in (*module._parameters.values(), *vars(module).values()))
    found = (value for value in values if isinstance(value, nn.Parameter | Absent) and value.is_floating_point())
    return next(found)


def cache_parts(cache: Cache) -> tuple[Any, ...]:
    """Returns the caches that have layers: `cache` itself, or its self-attention and cross-attention caches."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return (cache,)


def copy_cache(cache: Cache) -> Any:
    """Returns a copy that shares no layer with `cache`. It may share tensors, which dynamic layers never write to."""
    copied: Any = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        copied.self_attention_cache, copied.cross_attention_cache = map(copy_cache, cache_parts(cache))
        copied.is_updated = dict(cache.is_updated)
    else:
        copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied
