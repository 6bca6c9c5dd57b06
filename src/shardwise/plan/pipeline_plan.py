"""What a pipeline is cut from: the layers in the order in which they run, what passes between them, who holds what.

A *segment* is one run of a layer of the main stacks, and what the model computes between it and the next; the first one
also holds what runs before any layer, the last one what runs after all of them. A stage is a run of segments. Segments
are counted by calls, not by layers: a model that runs one layer again and again has as many segments as calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.errors import ConfigError, did_you_mean
from shardwise.plan.structure import is_within

__all__ = ["CutTensor", "LayerOrder", "PipelinePlan", "Returned"]


@dataclass(frozen=True, kw_only=True)
class CutTensor:
    """A tensor that depends on parameters, made in one segment and used in a later one: it travels.

    Attributes:
        anchor: where it is found when the segment after the cut begins (see `shardwise.stages.anchors`):
            `input:PATH` in the arguments of that layer's call, `output:FQN:NUMBER:PATH` in what call number NUMBER of
            the module FQN returned, `glue:CALLS:NUMBER:PATH` in what an operation around the layers returned.
        needs_gradient: whether a gradient comes back for it.
        is_written: whether it is changed in place after the cut.
    """

    anchor: str
    needs_gradient: bool = True
    is_written: bool = False


@dataclass(frozen=True, kw_only=True)
class Returned:
    """What a module returns, told by the arguments that look the same.

    Attributes:
        like: for every value that it returns, the name of an argument of the same shape and dtype, with `=` in front
            where it is that argument itself; empty for None.
        is_tuple: whether it returns a tuple, not a tensor.
    """

    like: tuple[str, ...]
    is_tuple: bool


@dataclass(frozen=True, kw_only=True)
class LayerOrder:
    """What was seen of a model while it ran.

    Attributes:
        calls: FQN of the layer of every segment, in the order of execution; a layer that runs twice is there twice.
        uses: FQN of every parameter, tied aliases by their own names, to the segments that compute with it under this
            name; parameters that nothing computes with are in none.
        cut_tensors: for every cut, before segment 1, 2, …, what crosses it.
        returns: FQN of a module to what it returns. Who passes it through need not run it: every layer that returns
            what looks like its arguments is here, and of the other modules those whose code asks for values.
        shares_dropped: whether what dropout makes of tensors that depend on no parameters crosses cuts, too, so that
            one stage draws for all of them.
        is_chain: whether every layer is given what the one before returned and nothing else of the model's. Then
            `cut_tensors` may be empty: they are seen in the first forward.
    """

    calls: tuple[str, ...]
    uses: Mapping[str, tuple[int, ...]]
    cut_tensors: tuple[tuple[CutTensor, ...], ...]
    returns: Mapping[str, Returned] = field(default_factory=dict)
    shares_dropped: bool = False
    is_chain: bool = False

    def starts_after(self, names: Iterable[str]) -> tuple[int, ...]:
        """The segments with which stages begin that end with these layers, each where it runs last; 0 first.

        Raises:
            ConfigError: one is no layer that runs, or the last one, after which nothing is left.
        """
        starts = {0}
        for name in names:
            if name not in self.calls:
                raise ConfigError(
                    f"no layer {str(name)!r} to cut a pipeline after{did_you_mean(str(name), self.calls)}",
                    why=f"the layers that run are {self.calls[0]} to {self.calls[-1]}",
                )
            starts.add(max(number for number, call in enumerate(self.calls) if call == name) + 1)
        if len(self.calls) in starts:
            raise ConfigError(f"a pipeline cut after {self.calls[-1]}, the last layer", why="nothing is left after it")
        return tuple(sorted(starts))


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How a model is cut into stages.

    Attributes:
        schedule: name of the schedule (see `shardwise.schedule.build`).
        starts: the segment with which every stage begins; the first one is 0.
        rank_of: the coordinate on pp that holds each stage.
    """

    order: LayerOrder
    schedule: str
    starts: tuple[int, ...]
    rank_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return len(self.starts)

    def segments(self, stage: int) -> range:
        """The segments of a stage."""
        ends = (*self.starts[1:], len(self.order.calls))
        return range(self.starts[stage], ends[stage])

    def stages_on(self, coord: int) -> tuple[int, ...]:
        """The stages that a coordinate on pp holds, in the order in which a microbatch passes them."""
        return tuple(stage for stage, rank in enumerate(self.rank_of) if rank == coord)

    def stage_of(self, segment: int) -> int:
        """The stage that a segment is in."""
        return sum(start <= segment for start in self.starts) - 1

    def stages_of_names(self, names: Iterable[str], tied: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """The stages that hold each parameter under each of its names.

        Those that compute with it under this name hold it so. Where nothing computes with a parameter under any name,
        the first stage of its layer holds it by its first one, outside of layers the first stage.

        Args:
            names: FQNs of all parameters, tied aliases included.
            tied: alias FQN to canonical FQN.
        """
        uses = self.order.uses
        found = {name: tuple(sorted(set(map(self.stage_of, uses.get(name, ()))))) for name in names}
        used = {tied.get(name, name) for name, stages in found.items() if stages}
        for name in found:
            if name not in tied and name not in used:
                found[name] = (self._stage_around(name),)
        return found

    def coord_computing(self, name: str) -> int:
        """The coordinate on pp of the first stage that computes with a buffer, and has what a forward left in it."""
        module = name.rpartition(".")[0]
        inside = is_within(name, self.order.calls)
        beside = (min(found) for used, found in self.order.uses.items() if found and is_within(used, (module,)))
        return self.rank_of[self._stage_around(name) if inside else self.stage_of(min(beside, default=0))]

    def _stage_around(self, name: str) -> int:
        inside = (segment for segment, layer in enumerate(self.order.calls) if is_within(name, (layer,)))
        return self.stage_of(next(inside, 0))
