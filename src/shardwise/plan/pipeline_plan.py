"""Input of pipeline cuts: the layers in the order in which they run, the tensors between them, and the stages.

A *segment* is one call of a layer of the main stacks, and everything the model computes until the next one. The first
segment also holds what runs before any layer, the last one what runs after all. A stage is a run of segments. Segments
count calls, not layers: a model that calls one layer repeatedly has as many segments as calls.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.errors import ConfigError, did_you_mean
from shardwise.plan.structure import is_within


@dataclass(frozen=True, kw_only=True)
class CutTensor:
    """A tensor that depends on parameters and crosses a cut: made in one segment and used in a later one.

    Attributes:
        anchor: where the tensor is found when the segment after the cut begins (see `shardwise.stages.run`):
            `input:PATH` in the arguments of that layer's call, `output:FQN:NUMBER:PATH` in the output of call NUMBER of
            the module FQN, `glue:CALLS:NUMBER:PATH` in the output of an operation between layers.
        needs_gradient: whether a gradient is sent back.
        is_written: whether the tensor is changed in place after the cut.
    """

    anchor: str
    needs_gradient: bool = True
    is_written: bool = False


@dataclass(frozen=True, kw_only=True)
class Returned:
    """What a module returns, in terms of its arguments: values of the same shape and dtype as an argument.

    Attributes:
        like: for every returned value, the name of an argument of the same shape and dtype, prefixed by `=` if it is
            that argument itself; "" for None.
        is_tuple: whether the module returns a tuple, not a tensor.
    """

    like: tuple[str, ...]
    is_tuple: bool


@dataclass(frozen=True, kw_only=True)
class LayerOrder:
    """The order in which a model runs its layers, and the tensors between them, recorded in one run.

    Attributes:
        calls: FQN of the layer of every segment, in order of execution; a layer that runs twice occurs twice.
        uses: FQN of every parameter, including tied aliases, to the segments that compute with it under this name;
            empty for unused parameters.
        cut_tensors: for every cut, before segment 1, 2, …, the tensors that cross it.
        returns: FQN of a module to the description of its output. A stage may pass the output through without running
            the module. Lists every layer whose output looks like its arguments, and other modules whose code asks for
            values.
        shares_dropped: whether dropout of tensors that depend on no parameters also crosses cuts, so that one stage
            draws for all.
        is_chain: whether every layer receives the previous layer's output and nothing else from the model. Then
            `cut_tensors` may be empty: they are found in the first forward.
    """

    calls: tuple[str, ...]
    uses: Mapping[str, tuple[int, ...]]
    cut_tensors: tuple[tuple[CutTensor, ...], ...]
    returns: Mapping[str, Returned] = field(default_factory=dict)
    shares_dropped: bool = False
    is_chain: bool = False

    def starts_after(self, names: Iterable[str]) -> tuple[int, ...]:
        """Returns the first segments of stages that end with the given layers, each at its last call; 0 comes first."""
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
    """How the segments of a model's forward are divided into stages, and which pp coordinate holds each stage.

    Attributes:
        schedule: name of the schedule (see `shardwise.schedule.schedule`).
        starts: first segment of every stage; the first is 0.
        rank_of: pp coordinate that holds each stage.
    """

    order: LayerOrder
    schedule: str
    starts: tuple[int, ...]
    rank_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return len(self.starts)

    def segments(self, stage: int) -> range:
        """Returns the segments of a stage."""
        ends = (*self.starts[1:], len(self.order.calls))
        return range(self.starts[stage], ends[stage])

    def stages_on(self, coord: int) -> tuple[int, ...]:
        """Returns the stages of a pp coordinate, in the order in which a microbatch passes them."""
        return tuple(stage for stage, rank in enumerate(self.rank_of) if rank == coord)

    def stage_of(self, segment: int) -> int:
        """Returns the stage that contains a segment."""
        return sum(start <= segment for start in self.starts) - 1

    def stages_of_names(self, names: Iterable[str], tied: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Returns the stages that hold each parameter under each of its names.

        A stage holds a parameter under the names with which it computes. A parameter that nothing computes with is held
        under its first name: by the first stage of its layer, or outside of layers by the first stage.
        """
        uses = self.order.uses
        found = {name: tuple(sorted(set(map(self.stage_of, uses.get(name, ()))))) for name in names}
        used = {tied.get(name, name) for name, stages in found.items() if stages}
        for name in found:
            if name not in tied and name not in used:
                found[name] = (self._stage_around(name),)
        return found

    def coord_computing(self, name: str) -> int:
        """Returns the pp coord of the first stage that computes with a buffer, and so has its value after a forward."""
        module = name.rpartition(".")[0]
        inside = is_within(name, self.order.calls)
        beside = (min(found) for used, found in self.order.uses.items() if found and is_within(used, (module,)))
        return self.rank_of[self._stage_around(name) if inside else self.stage_of(min(beside, default=0))]

    def _stage_around(self, name: str) -> int:
        inside = (segment for segment, layer in enumerate(self.order.calls) if is_within(name, (layer,)))
        return self.stage_of(next(inside, 0))
