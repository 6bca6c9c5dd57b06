"""State that the split modules of one model share while the model runs."""

import datetime
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.collectives import Group
from shardwise.errors import BatchError
from shardwise.mesh import Mesh
from shardwise.runtime.forward_state import ForwardState, device_rng, mix
from shardwise.runtime.modes import with_attributes


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh from this rank's view.

    Attributes:
        group: process group along the axis; None if the axis has one rank.
    """

    name: str
    group: Group | None = None
    size: int = 1
    coord: int = 0

    @classmethod
    def of(cls, mesh: Mesh, name: str) -> "Axis":
        """Returns the axis called `name` of `mesh`."""
        return cls(name, group=mesh.group(name), size=mesh.size(name), coord=mesh.coord(name))

    def __deepcopy__(self, memo: dict[int, object]) -> "Axis":
        return self  # process groups cannot be copied

    def even_sizes(self, length: int) -> tuple[int, ...]:
        """Returns each rank's number of elements if `length` elements are chunked over the axis like `torch.chunk`."""
        run = -(-length // self.size)
        return tuple(min(length, (coord + 1) * run) - min(length, coord * run) for coord in range(self.size))

    def equal_sizes(self, length: int) -> tuple[int, ...]:
        """Returns each rank's number of elements of an evenly divided `length`, which ranks do not exchange."""
        if length % self.size:
            raise BatchError(
                f"a sequence of {length} does not divide among {self.size} {self.name} ranks",
                why="parallel layers take parts of the sequence that are of one length",
                fix=f"pad it to a multiple of {self.size}, or leave sequence_parallel_enabled out",
            )
        return self.even_sizes(length)


@dataclass
class Steps:
    """Log of the optimizer steps of one model. Ranks of one stage compare it to find one that stepped differently."""

    count: int = 0
    digest: int = 0
    last: str = "nothing"

    def add(self, described: str) -> None:
        """Adds a step. `described`: the optimizer's class and options."""
        self.count, self.digest, self.last = self.count + 1, zlib.crc32(described.encode(), self.digest), described

    def __str__(self) -> str:
        return f"{self.count}, the last by {self.last}; checksum of all {self.digest:08x}"


@dataclass
class SplitContext:
    """State that the split modules of one model share: the mesh axes, and the forward that is running.

    Attributes set by the split:
        tp: the tensor-parallel axis.
        mesh: one-dimensional `DeviceMesh` of the tp axis, used for logits; None in one process.
        device: device on which modules compute and draw random numbers.
        timeout: timeout of the mesh's process groups.
        same_rows: group of all ranks that must receive the same rows, if it is larger than the tp group (tp and pp).
        has_dropout: whether any module draws random numbers in training.
        model_name: class name of the model, for messages.

    Attributes of the running step or forward:
        state: state of the running forward. Each forward has its own, because forwards of copies of a model, which
            share this context, may be nested, and because backward may recompute parts of an earlier forward.
        drops_output: whether the caller uses only the loss of the forward's output.
        batch_compared: whether the ranks of `same_rows` have already compared the batch.

    Attributes that accumulate:
        gathered_for: functions for which a forward had to gather split logits.
        last_gathered: name of the split logits that were gathered last.
        steps: log of the optimizer steps.
    """

    tp: Axis = Axis("tp")
    mesh: dist.DeviceMesh | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - frozen
    timeout: datetime.timedelta = datetime.timedelta(seconds=600)
    same_rows: Group | None = None
    has_dropout: bool = False
    model_name: str = "the model"

    state: ForwardState = field(default_factory=ForwardState)
    drops_output: bool = False
    batch_compared: bool = False

    gathered_for: set[str] = field(default_factory=set)
    last_gathered: str | None = None
    steps: Steps = field(default_factory=Steps)
    _around: list[tuple[nn.Module, ForwardState]] = field(default_factory=list)

    @classmethod
    def of(cls, mesh: Mesh, *, has_dropout: bool = False) -> "SplitContext":
        """Context of a new model on `mesh`."""
        return cls(
            tp=Axis.of(mesh, "tp"),
            mesh=mesh.tensor_mesh,
            device=mesh.device,
            timeout=mesh.timeout,
            has_dropout=has_dropout,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> "SplitContext":
        # A copied model runs on the same ranks; process groups cannot be copied.
        return self

    @property
    def is_under_way(self) -> bool:
        """Whether a forward is running."""
        return bool(self._around)

    def begin_forward(self, module: nn.Module) -> None:
        """Begins a new state for a forward of `module`, the model or one of its modules, until `end_forward`."""
        self._around.append((module, self.state))
        self.state = ForwardState()

    def end_forward(self, module: nn.Module) -> None:
        """Ends the forward of `module`, also after an exception. Recomputation in backward uses the outermost state."""
        if self._around and self._around[-1][0] is module:
            self.state.end()
            _, around = self._around.pop()
            if self._around:
                self.state = around

    def resumed(self, state: ForwardState) -> AbstractContextManager[None]:
        """Context manager: makes `state` the running forward's state while a part of that forward is recomputed."""
        return with_attributes(self, state=state)

    def fork_rng(self, level: str, module: nn.Module, *, replicated: str = "") -> None:
        """Switches to another random stream until `restore_rng(level)` (see [Note: random numbers]).

        Args:
            level: "layer", "full_sequence", "region" or "adapter"; each level nests inside the one before.
            module: module that draws the numbers. Does nothing unless it trains with dropout.
            replicated: name of a replicated stream to use inside a rank-local one. Use the module's name, so that
                modules of one layer draw different masks.
        """
        if self.has_dropout and module.training:
            self.state.random.begin(level, self.device, self.tp.coord, replicated=replicated)

    def restore_rng(self, level: str) -> None:
        """Restores the random stream that was active before `fork_rng(level)`, unless it is already restored."""
        self.state.random.end(level)

    def draw_seed(self, module: nn.Module) -> int | None:
        """Returns the seed for `stage_stream`, from the replicated stream; None if nothing is dropped."""
        return int(torch.empty((), dtype=torch.int64).random_()) if self.has_dropout and module.training else None

    @contextmanager
    def stage_stream(self, seed: int | None, stage: int, microbatch: int) -> Iterator[None]:
        """Context manager: switches to the random stream of one stage and microbatch (see [Note: random numbers])."""
        with nullcontext() if seed is None else device_rng(self.device, mix(seed, f"{stage}.{microbatch}")):
            yield
