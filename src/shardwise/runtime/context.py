"""What the split modules of one model share while it runs."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.comm.operations import Group
from shardwise.errors import LayoutError
from shardwise.mesh import Mesh

__all__ = ["ForwardState", "GradientFactor", "SplitContext", "Sum", "ends_missing", "generator_of", "seeded"]

LEVELS = ("layer", "full_sequence", "region", "adapter")
"""Of random streams, from the outside in."""

_REPLICATED = 0x9E3779B97F4A7C15  # separates streams whose seeds come from the same number


@dataclass
class Entered:
    """The tensors that entered regions last, by their slots (which input, and how), with what the regions were given.

    # [Note: entered once]
    Regions that are given the very same tensor (the query, key and value of an attention that are regions of their own,
    an attention and an MLP in parallel, the encoder's states in every layer of a decoder) share one entry: its
    gradients meet after it, and one collective sums them. Sharing is by identity, which is the same on every rank.
    """

    _slots: dict[Hashable, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = field(default_factory=dict)

    def get_or_enter(
        self, slot: Hashable, x: torch.Tensor, enter: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`enter(x)`, or what it gave for `x` before if nothing else has been in the slot since.

        Only where there is a graph: nothing is summed without one, and what was made without one must not enter one.
        """
        if not (torch.is_grad_enabled() and x.requires_grad):
            return enter(x)
        known = self._slots.get(slot)
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        given = enter(x)
        self._slots[slot] = weakref.ref(x), x._version, given
        return given

    def clear(self) -> None:
        """Forgets everything: the next forward starts again."""
        self._slots.clear()


@dataclass
class GradientFactor:
    """A hook on a tensor that multiplies its gradient, by a number that may be known only later in the forward."""

    value: float = 1.0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * self.value if self.value != 1.0 else None


class Sum(NamedTuple):
    """A sum over ranks inside of a region, its version when it was made, and what its gradient is multiplied by."""

    x: torch.Tensor
    version: int
    factor: GradientFactor | None


@dataclass
class ForwardState:
    """What one forward carries, from the model's entry to its end, and again where a part of it is recomputed.

    Attributes:
        runs_model: whether it is one of the full model, and not of a part that was called by itself.
        sequence_parallel: whether the region under way is given a part of the sequence: it is in a split stack of
            layers, and in no module there that is given all of it. Every region says so itself when it is entered,
            because a layer that is recomputed in backward is not entered through its hooks.
        sequence_length: true length of the sequence there: parts are padded to equal lengths, and the padding is
            removed inside every region.
        lengths: FQN of every stack to the length of its sequence, set where it is entered.
        open_stack: name of the stack of layers whose first one has split the sequence and whose last one has not yet
            gathered it.
        stack_rows: batch size of what entered the stack of layers under way.
        rows: batch size of what entered the region under way, 0 where that was flattened to tokens.
        keep_logits_split: whether the forward computes its loss inside, so that logits stay split.
        defer_embedding: whether the vocabulary embedding, if it is called now, returns its partial sums for the entry
            of the stack to reduce: only on the way there, never for a caller from outside.
        hands_out_hidden: whether the caller is given the hidden states of all layers.
        holds_partial_rows: whether it has done so (not where a caller passes `inputs_embeds`).
        entered: what has entered regions lately and what they were given for it (see [Note: entered once]).
        sums: what row-split linears have summed in the region under way (see [Note: after the sum]); None outside.
        pending_sum: the partial sum of a region that is left to a later one of the same layer.
        loss_mode: the mode that a head has entered.
        random: generators whose stream was changed, by level, with their state before.
        replicated_seed: what the seeds of the ranks' streams in the region under way have in common.
    """

    runs_model: bool = False
    sequence_parallel: bool = False
    sequence_length: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    open_stack: str | None = None
    stack_rows: int = 0
    rows: int = 0
    keep_logits_split: bool = False
    defer_embedding: bool = False
    holds_partial_rows: bool = False
    hands_out_hidden: bool = False
    entered: Entered = field(default_factory=Entered)
    sums: list[Sum] | None = None
    pending_sum: torch.Tensor | None = None
    loss_mode: TorchFunctionMode | None = None
    random: dict[str, tuple[torch.Generator, torch.Tensor]] = field(default_factory=dict)
    replicated_seed: int | None = None

    def enter_stack(self, stack: str | None) -> None:
        """What follows is in the stack of that name and is given a part of the sequence; None: it is not."""
        inside, length = stack is not None, self.length_of(stack) if stack is not None else 0
        # Written only where it changes: a write makes torch.compile compile again.
        if (inside, length) != (self.sequence_parallel, self.sequence_length):
            self.sequence_parallel, self.sequence_length = inside, length

    def enter_rows(self, rows: int) -> None:
        """The batch size of what enters the region that follows, 0 where that is flattened to tokens."""
        if rows != self.rows:  # as above
            self.rows = rows

    def length_of(self, stack: str) -> int:
        """The true length of the sequence in a stack of layers.

        Raises:
            LayoutError: its first layer has not run.
        """
        if stack not in self.lengths:
            raise ends_missing(stack, "the first of its layers has not run")
        return self.lengths[stack]

    def end(self) -> None:
        """Ends what is under way, also where the forward raised."""
        self.runs_model = self.keep_logits_split = False
        self.end_layers()
        if self.loss_mode is not None:
            mode, self.loss_mode = self.loss_mode, None
            mode.__exit__(None, None, None)

    def end_layers(self) -> None:
        """Ends what stacks of layers, and what runs before them, have under way."""
        self.defer_embedding = self.holds_partial_rows = False
        self.entered.clear()
        self.sums = self.pending_sum = self.open_stack = None
        self.restore_rng("layer")

    def restore_rng(self, level: str) -> None:
        """Back to the stream before `fork_rng(level)`, and what was begun inside, if that has not happened yet."""
        for inner in LEVELS[LEVELS.index(level) :][::-1]:
            if inner in self.random:
                generator, state = self.random.pop(inner)
                generator.set_state(state)


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
    """The tp group of a split model, and the forward of it that is under way.

    Attributes:
        group: the tp process group; None in one process.
        size: ranks in it.
        coord: this rank's position.
        mesh: one-dimensional `DeviceMesh` of the tp axis, for the logits; None in one process.
        device: what modules run on, and draw random numbers from.
        partial_after: whether the end of the layer stack sums the gradient of the split head's input.
        has_dropout: whether anything in the model draws random numbers in training.
        state: of the forward under way. Each has its own: forwards of copies of a model, which share this context, may
            be nested, and backward may recompute parts of an earlier one after a later one has run.
        same_rows: the group of all ranks that must be given the same rows, where it is a larger one than `group`.
        drops_output: whether nobody is given what forwards return besides the loss.
        batch_compared: whether forwards are given parts of a batch that those ranks have compared.
        model_name: the model's class, for messages.
        gathered_for: functions for which a forward has had to gather split logits.
        last_look: name of the split logits that were gathered last.
        steps: what optimizers have done to the parameters, by which steps.

    # [Note: random numbers]
    All tp ranks start from equal random states, and replicated computations must drop the same: there they draw from
    this *replicated* stream. Where each works on its own part of the sequence (a layer) or its own heads and features
    (a region), it draws from a *rank-local* stream, whose seed is a number drawn from the stream before. So every rank
    advances the replicated stream by the same number, and seeding or restoring it, as a caller or a layer that is
    recomputed in backward does, determines the rank-local streams too.

    Over pp the replicated stream stays the same too: a pipeline draws one seed from it for each step, and every stage
    has a stream of its own for each microbatch (`stage_stream`), which is the replicated one of its tp ranks.
    """

    group: Group | None = None
    size: int = 1
    coord: int = 0
    mesh: dist.DeviceMesh | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - frozen
    partial_after: bool = False
    has_dropout: bool = False
    state: ForwardState = field(default_factory=ForwardState)
    same_rows: Group | None = None
    batch_compared: bool = False
    drops_output: bool = False
    model_name: str = "the model"
    gathered_for: set[str] = field(default_factory=set)
    last_look: str | None = None
    steps: Steps = field(default_factory=Steps)
    _around: list[tuple[nn.Module, ForwardState]] = field(default_factory=list)

    @classmethod
    def of(cls, mesh: Mesh, *, has_dropout: bool = False) -> SplitContext:
        """That of a new model over a mesh."""
        return cls(
            group=mesh.group("tp"),
            size=mesh.size("tp"),
            coord=mesh.coord("tp"),
            mesh=mesh.tensor_mesh,
            device=mesh.device,
            has_dropout=has_dropout,
        )

    def even_sizes(self, length: int) -> tuple[int, ...]:
        """Lengths of the ranks' parts of `length` elements, as `torch.chunk` splits them."""
        run = -(-length // self.size)
        return tuple(min(length, (coord + 1) * run) - min(length, coord * run) for coord in range(self.size))

    def __deepcopy__(self, memo: dict[int, object]) -> SplitContext:
        # A copied model runs on the same ranks; process groups cannot be copied.
        return self

    @property
    def is_under_way(self) -> bool:
        """Whether a forward is."""
        return bool(self._around)

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward is under way, of the model or of a transformers model in it, that knows of its layers."""
        return self.is_under_way or self.state.runs_model

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether the forward under way is one of `module`, and within no other."""
        return len(self._around) == 1 and self._around[0][0] is module

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
            level: one of `LEVELS`.
            module: what draws them; nothing happens unless it trains and the model has dropout.
            replicated: inside a layer whose stream is rank-local, the name of a replicated stream: the module's,
                because what several modules of the layer drop must not repeat.
        """
        if not (self.has_dropout and module.training) or level in self.state.random:
            return  # several modules may enter one region, one after another
        generator = generator_of(self.device)
        if replicated:
            self.state.replicated_seed = None
            seed = generator.initial_seed() - self.coord + _REPLICATED + zlib.crc32(replicated.encode())
        else:
            seed = int(torch.empty((), dtype=torch.int64).random_()) + 1 + self.coord
            around = generator.initial_seed() if self.state.sequence_parallel and level == "region" else seed
            self.state.replicated_seed = around - self.coord
        self._fork_rng(level, generator, seed)

    def fork_replicated_rng(self, module: nn.Module, name: str) -> None:
        """From here to `restore_rng("adapter")` what `module`, of that name, draws is the same on all ranks, also in a
        region whose stream is rank-local: for what is computed there with the full input.
        """
        seed, own = self.state.replicated_seed, self.state.random
        if not (self.has_dropout and module.training) or seed is None or "region" not in own or "adapter" in own:
            return
        self._fork_rng("adapter", generator_of(self.device), seed + _REPLICATED + zlib.crc32(name.encode()))

    def _fork_rng(self, level: str, generator: torch.Generator, seed: int) -> None:
        self.state.random[level] = generator, generator.get_state()
        generator.manual_seed(seed % 2**63)

    def restore_rng(self, level: str) -> None:
        """Back to the stream before `fork_rng(level)`, if that has not happened yet."""
        self.state.restore_rng(level)

    def draw_seed(self, module: nn.Module) -> int | None:
        """A number for `stage_stream`, drawn from the stream that all ranks share; None where nothing is dropped."""
        return int(torch.empty((), dtype=torch.int64).random_()) if self.has_dropout and module.training else None

    @contextmanager
    def stage_stream(self, seed: int | None, stage: int, microbatch: int) -> Iterator[None]:
        """Inside, random numbers are those of one stage and microbatch (see [Note: random numbers])."""
        if seed is None:
            yield
            return
        with seeded(self.device, seed ^ zlib.crc32(f"{stage}.{microbatch}".encode()) * _REPLICATED):
            yield


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, modules on `device` draw from a stream of that seed; afterwards as before."""
    generator = generator_of(device)
    state = generator.get_state()
    generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        generator.set_state(state)


def ends_missing(stack: str, what: str) -> LayoutError:
    """The error for a stack of layers of which an end does not run."""
    return LayoutError(
        f"{stack} does not run from its first layer to its last with sequence parallelism: {what}",
        why="the first layer splits the sequence over tp, and the last one gathers it",
        fix="run all layers (layerdrop 0, none skipped or left out at the end), or use sequence_parallel=False",
    )


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that modules on `device` draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
