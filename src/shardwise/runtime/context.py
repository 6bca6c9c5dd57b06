"""What the split modules of one model share while it runs."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.operations import Group
from shardwise.mesh import Mesh
from shardwise.runtime.axis import Axis
from shardwise.runtime.forward_state import ForwardState
from shardwise.runtime.rng import device_rng, mix

__all__ = ["SplitContext"]


@dataclass
class Steps:
    """The steps of optimizers, which ranks of one stage take alike: compared before the next training step."""

    count: int = 0
    digest: int = 0
    last: str = "nothing"

    def add(self, described: str) -> None:
        """Notes a step: of which optimizer, with which options."""
        self.count, self.digest, self.last = self.count + 1, zlib.crc32(described.encode(), self.digest), described

    def __str__(self) -> str:
        return f"{self.count}, the last by {self.last}; checksum of all {self.digest:08x}"


@dataclass
class SplitContext:
    """The axes over which a model is split, and the forward of it that is under way.

    Attributes, which the split decides:
        tp: the axis of tensor parallelism.
        mesh: one-dimensional `DeviceMesh` of the tp axis, for the logits; None in one process.
        device: what modules run on, and draw random numbers from.
        timeout: of the mesh.
        same_rows: the group of all ranks that must be given the same rows, where it is a larger one than that of `tp`.
        has_dropout: whether anything in the model draws random numbers in training.
        is_compiled: whether layers are compiled, whose hooks stay as they are.
        model_name: the model's class, for messages.

    Of the step or forward under way:
        state: of the forward. Each has its own: forwards of copies of a model, which share this context, may be nested,
            and backward may recompute parts of an earlier one after a later one has run.
        drops_output: whether nobody is given what forwards return besides the loss.
        batch_compared: whether forwards are given parts of a batch that `same_rows` have compared.

    Of all so far:
        gathered_for: functions for which a forward has had to gather split logits.
        last_gathered: name of the split logits that were gathered last.
        steps: what optimizers have done to the parameters, by which steps.
    """

    tp: Axis = Axis("tp")  # noqa: RUF009 - frozen
    mesh: dist.DeviceMesh | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - frozen
    timeout: datetime.timedelta = datetime.timedelta(seconds=600)
    same_rows: Group | None = None
    has_dropout: bool = False
    is_compiled: bool = False
    model_name: str = "the model"

    state: ForwardState = field(default_factory=ForwardState)
    drops_output: bool = False
    batch_compared: bool = False

    gathered_for: set[str] = field(default_factory=set)
    last_gathered: str | None = None
    steps: Steps = field(default_factory=Steps)
    _around: list[tuple[nn.Module, ForwardState]] = field(default_factory=list)

    @classmethod
    def of(cls, mesh: Mesh, *, has_dropout: bool = False) -> SplitContext:
        """That of a new model over a mesh."""
        return cls(
            tp=Axis.of(mesh, "tp"),
            mesh=mesh.tensor_mesh,
            device=mesh.device,
            timeout=mesh.timeout,
            has_dropout=has_dropout,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> SplitContext:
        # A copied model runs on the same ranks; process groups cannot be copied.
        return self

    @property
    def is_under_way(self) -> bool:
        """Whether a forward is."""
        return bool(self._around)

    def begin_forward(self, module: nn.Module) -> None:
        """A forward of the model, or of a module of it, begins, perhaps within another one."""
        self._around.append((module, self.state))
        self.state = ForwardState()

    def end_forward(self, module: nn.Module) -> None:
        """It has ended, perhaps by an error. The outermost one's state stays for what backward recomputes."""
        if self._around and self._around[-1][0] is module:
            self.state.end()
            _, around = self._around.pop()
            if self._around:
                self.state = around

    @contextmanager
    def resumed(self, state: ForwardState) -> Iterator[None]:
        """Inside, the forward under way is that of `state`, of which a part is recomputed."""
        current, self.state = self.state, state
        try:
            yield
        finally:
            self.state = current

    def fork_rng(self, level: str, module: nn.Module, *, replicated: str = "") -> None:
        """From here to `restore_rng(level)` random numbers come from another stream (see [Note: random numbers]).

        Args:
            level: "layer", "full_sequence", "region" or "adapter", each inside of the one before.
            module: what draws them; nothing happens unless it trains and the model has dropout.
            replicated: where the stream is rank-local, the name of a replicated stream: the module's, because what
                several modules of a layer drop must not repeat.
        """
        if self.has_dropout and module.training:
            self.state.random.begin(level, self.device, self.tp.coord, replicated=replicated)

    def restore_rng(self, level: str) -> None:
        """Back to the stream before `fork_rng(level)`, if that has not happened yet."""
        self.state.random.end(level)

    def draw_seed(self, module: nn.Module) -> int | None:
        """A number for `stage_stream`, drawn from the stream that all ranks share; None where nothing is dropped."""
        return int(torch.empty((), dtype=torch.int64).random_()) if self.has_dropout and module.training else None

    @contextmanager
    def stage_stream(self, seed: int | None, stage: int, microbatch: int) -> Iterator[None]:
        """Inside, random numbers are those of one stage and microbatch (see [Note: random numbers])."""
        with nullcontext() if seed is None else device_rng(self.device, mix(seed, f"{stage}.{microbatch}")):
            yield
