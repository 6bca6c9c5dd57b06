"""A stage under torch's pipeline runtime: receives, computes and sends in the runtime's order.

# [Note: stages under torch's runtime]
`_PipelineScheduleRuntime` runs any order of actions, adds sends and receives, and gathers and reduces FSDP2's units. It
calls a few methods of a stage. This class implements them instead of using torch's `PipelineStage`, which exchanges
shapes, runs the model to find them, keeps one buffer per microbatch forever, and differs between torch versions
(docs/decisions/0035-what-torchs-pipelining-does.md). Here shapes follow from the arguments, so they may differ between
steps. A buffer is allocated when its receive is posted and freed after the backward.

# [Note: split backward]
For every weight, torch finds the nodes at which its path meets the path of the inputs. The first part keeps the
gradients that arrive there, and the second part continues from there. A weight whose path never meets the path of the
inputs, because an output depends on weights alone, would be lost. So outputs are tied to inputs, which adds nothing to
any gradient. A stage whose inputs need no gradient has no first part: its whole backward is the second.
`check_complete` checks in the graph that no weight is left out.

torch groups weights that meet the inputs at the same node, but not weights that share nodes with two others (a T5
decoder's first layer, whose self-attention depends on no input of the stage). Such a weight is in several groups and
would be counted several times, so overlapping groups are joined (`_joined`). A path between two nodes of a group may
lead through those of another group, so the graph is kept until all groups are done.

torch before 2.13 computes wrong gradients for weights that a stage uses twice. Only there, the second part computes the
gradients of the activations again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import _backward as torch_backward
from torch.distributed.pipelining import stage as torch_stage

from shardwise.comm.collectives import Group
from shardwise.errors import LayoutError
from shardwise.pipeline.outputs import StageCaches
from shardwise.runtime.context import SplitContext
from shardwise.schedule.schedule import Action, Kind
from shardwise.schedule.timeline import Span
from shardwise.stages.model import Stages
from shardwise.stages.run import StageTensor

_FINDS_ALL_USES = hasattr(torch_backward, "_autograd_grad_for_inputs")  # torch 2.13


def detached_alias(x: Tensor) -> Tensor:
    """Returns a tensor of the memory of `x` that is no view of it: it may be detached or written in place."""
    return torch.ops.aten._unsafe_view(x, x.shape)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.num_inputs = len(tensors) - num_outputs
        return tuple(detached_alias(x.detach()) for x in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradients, *(None,) * ctx.num_inputs)


def tie(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns `outputs`, where those with gradients also depend on `inputs`, whose gradients do not change."""
    needed = [x for x in inputs if x.requires_grad]
    tied = [x for x in outputs if x.requires_grad]
    if not needed or not tied:
        return tuple(outputs)
    replaced = iter(_Tie.apply(len(tied), *tied, *needed))
    return tuple(next(replaced) if x.requires_grad else x for x in outputs)


def backward_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Iterable[nn.Parameter]
) -> "tuple[list[Tensor | None], SecondPart]":
    """Runs the first part of a backward. Returns the gradients of `inputs` (None where none is needed), and a function
    that computes the gradients of `weights` later and adds them to `.grad`.

    Args:
        outputs: outputs of `tie`, whose graph reaches `inputs`.
        gradients: the gradient of each output.
    """
    needed = [x for x in inputs if x.requires_grad]
    own = list(weights)
    if _FINDS_ALL_USES:
        found, groups = torch_backward.stage_backward_input(list(outputs), list(gradients), needed, iter(own))
        second = SecondPart(own, groups=_joined(groups))
    else:
        found = torch.autograd.grad(outputs, needed, gradients, retain_graph=True, allow_unused=True)
        second = SecondPart(own, outputs=outputs, gradients=gradients)
    for x in needed:
        x.grad = None
    by_input = iter(found)
    return [next(by_input) if x.requires_grad else None for x in inputs], second


def _joined(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns torch's groups of weights, with overlapping groups joined, without nodes that no gradient has reached."""
    joined: list[tuple[set[Any], dict[Any, Any]]] = []
    for group in groups:
        weights = set(group["params"])
        reached = zip(group["intermediates"], group.get("grads") or [], strict=False)
        nodes = {node: gradients for node, gradients in reached if gradients is not None}
        apart = []
        for other in joined:
            if weights.isdisjoint(other[0]) and nodes.keys().isdisjoint(other[1]):
                apart.append(other)
            else:
                weights, nodes = weights | other[0], other[1] | nodes
        joined = [*apart, (weights, nodes)]
    return [
        {"params": weights, "intermediates": list(nodes), "grads": list(nodes.values())} for weights, nodes in joined
    ]


def _hold(node: Any, saved: Any) -> Any:
    """Makes the second part begin at a node with the gradients recorded there, which tensor hooks have changed."""
    return node.register_prehook(lambda _: saved)


class SecondPart:
    """Second part of a backward: adds the gradients of weights to `.grad` when called, once."""

    def __init__(
        self,
        weights: list[nn.Parameter],
        *,
        groups: Any = None,
        outputs: Sequence[Tensor] = (),
        gradients: Sequence[Tensor] = (),
    ) -> None:
        self.weights, self.groups, self._outputs, self._gradients = weights, groups, outputs, gradients

    def __call__(self) -> None:
        if self.groups is not None:
            noted = (zip(group["intermediates"], group["grads"], strict=True) for group in self.groups)
            handles = [_hold(node, saved) for pairs in noted for node, saved in pairs]
            try:
                torch_backward.stage_backward_weight(iter(self.weights), self.groups, retain_graph=True)
            finally:
                for handle in handles:
                    handle.remove()
            self.groups = []
        elif trained := [weight for weight in self.weights if weight.requires_grad]:
            torch.autograd.backward(self._outputs, self._gradients, inputs=trained)


def check_complete(ends: Sequence[Any], inputs: Sequence[Tensor], second: SecondPart, *, stage: int) -> None:
    """Raises if a weight on which the outputs depend is in no group of the second part.

    Args:
        ends: the outputs' graph nodes, which the outputs release in the first part.
    """
    if second.groups is None:
        return
    known = {node for group in second.groups for node in group["params"]}
    own = {id(x) for x in inputs}
    lost = [node.variable for node in _accumulating(ends) if node not in known and id(node.variable) not in own]
    if lost:
        raise LayoutError(
            f"gradients of {len(lost)} parameters of stage {stage} would be lost",
            why="the backward is in two parts, and the second does not reach "
            + ", ".join(sorted({str(list(x.shape)) for x in lost})),
            fix='use a schedule that does not split the backward, such as "1f1b" or "interleaved_1f1b"',
        )


def _accumulating(roots: Iterable[Any]) -> list[Any]:
    """Returns the leaf nodes of the graph, which add to `.grad`."""
    pending, seen, found = [root for root in roots if root is not None], set(), []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node)
        pending += [following for following, _ in node.next_functions if following is not None]
    return found


@dataclass
class Microbatch:
    """Input of all stages for one microbatch.

    Attributes:
        loss_of: computes from the model's output, on the last stage, the scalar on which backward is called; or None.
        caches: key/value caches, which each stage gets in its own form.
    """

    arguments: Mapping[str, Any]
    loss_of: Callable[[Any], Tensor] | None = None
    caches: StageCaches | None = None


@dataclass
class ScheduleRun:
    """State that the stages share in one run of a schedule.

    Attributes:
        seed: seed of the random streams (see `SplitContext.stage_stream`).
        outputs: the last stage's outputs by microbatch, with `keeps_outputs`.
        spans: times of the actions, in seconds of `time.perf_counter`, with `is_timed`.
    """

    parts: Sequence[Microbatch]
    seed: int | None = None
    has_backward: bool = True
    keeps_outputs: bool = False
    is_timed: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


Base: Any = torch_stage._PipelineStageBase  # untyped, and its abstract methods differ between versions


class PipelineStage(Base):
    """One stage of this rank; see [Note: stages under torch's runtime].

    Args:
        rank_of: rank in the group of each stage.
        root: FSDP2 root of this stage, or any module that holds its parameters.
        splits: whether the schedule computes gradients of weights separately from those of inputs.
        enters_root: whether calling `root` with arguments and received tensors runs the stage.

    Communicates: with the ranks of the previous and the next stage, one message per cut tensor and microbatch in
    forward, and one in backward for those that need a gradient.
    """

    def __init__(
        self,
        stages: Stages,
        number: int,
        *,
        rank_of: Sequence[int],
        root: nn.Module,
        context: SplitContext,
        group: Group,
        splits: bool,
        enters_root: bool,
    ) -> None:
        super().__init__(root, number, len(rank_of), context.device, group)
        self._stages, self._context, self._rank_of, self._splits = stages, context, rank_of, splits
        self._enters_root, self._is_managed = enters_root, isinstance(root, FSDPModule)
        self._is_sent = number + 1 < len(rank_of) and rank_of[number + 1] != rank_of[number]
        self._checked: set[int] = set()
        self.round = ScheduleRun(parts=())
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._forwards: dict[int, tuple[Any, Any]] = {}  # outputs and inputs of each microbatch
        self._gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._later: dict[int, Callable[[], None]] = {}
        self.most_received = 0

    # What torch would set up: nothing.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _create_grad_recv_info(self, *args: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    @property
    def args_recv_info(self) -> Any:
        """Torch's record of receives, which stays empty."""
        return {0: ()}

    @args_recv_info.setter
    def args_recv_info(self, value: Any) -> None:
        return None

    def clear_runtime_states(self) -> None:
        """Drops all state of a run."""
        for kept in (self._received, self._gradients, self._later, self._forwards, self.bwd_cache):
            kept.clear()

    # What is received and sent.

    def _crossing(self, number: int) -> tuple[tuple[StageTensor, ...], tuple[StageTensor, ...]]:
        part = self.round.parts[number]
        before = part.caches.before() if part.caches is not None else {}
        return self._stages.shapes(self.stage_index, {**part.arguments, **before})

    def _receive(self, tensors: Sequence[Tensor | None], source: int) -> list[dist.P2POp]:
        rank = self._rank_of[source]
        return [dist.P2POp(dist.irecv, x, group=self.group, group_peer=rank) for x in tensors if x is not None]

    def _send(self, tensors: Sequence[Tensor | None], to: int) -> list[dist.P2POp]:
        rank = self._rank_of[to]
        return [dist.P2POp(dist.isend, x, group=self.group, group_peer=rank) for x in tensors if x is not None]

    def _empty(self, like: StageTensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self.device)

    def get_fwd_recv_ops(self, number: int) -> list[dist.P2POp]:
        """Returns the receives from the previous stage."""
        self._received[number] = tuple(map(self._empty, self._crossing(number)[0]))
        self.most_received = max(self.most_received, len(self._received))
        return self._receive(self._received[number], self.stage_index - 1)

    def get_fwd_send_ops(self, number: int) -> list[dist.P2POp]:
        """Returns the sends of this stage's outputs."""
        outputs, _ = self._forwards[number] if self.round.has_backward else self._forwards.pop(number)
        return self._send([x.detach().contiguous() for x in outputs], self.stage_index + 1)

    def get_bwd_recv_ops(self, number: int) -> list[dist.P2POp]:
        """Returns the receives of the gradients of this stage's outputs."""
        if not self.round.has_backward or self.is_last:
            return []
        self._gradients[number] = tuple(self._empty(x) if x.needs_gradient else None for x in self._crossing(number)[1])
        return self._receive(self._gradients[number], self.stage_index + 1)

    def get_bwd_send_ops(self, number: int) -> list[dist.P2POp]:
        """Returns the sends of the gradients of this stage's inputs."""
        if not self.round.has_backward or self.is_first:
            return []
        return self._send(self.bwd_cache.pop(number), self.stage_index - 1)

    # Stages that follow each other on one rank hand over instead; copies, because either may write to what it has.

    def set_local_fwd_input(self, outputs: Any, number: int) -> None:
        """Stores the outputs of the previous stage, which is on this rank, as this stage's input."""
        self._received[number] = tuple(x.detach().clone() for x in outputs)

    def get_local_bwd_output(self, number: int) -> tuple[Tensor | None, ...]:
        """Returns the gradients for the previous stage on this rank."""
        return self.bwd_cache.pop(number) if self.round.has_backward else ()

    def set_local_bwd_input(self, gradients: tuple[Tensor | None, ...], number: int) -> None:
        """Stores the gradients from the next stage, which is on this rank."""
        if self.round.has_backward:
            self._gradients[number] = gradients

    # What is computed.

    def forward_one_chunk(
        self,
        number: int,
        args: Any = (),
        kwargs: Any = None,
        save_forward_output: bool = True,  # noqa: FBT001, FBT002 - torch's
    ) -> Any:
        """Runs the forward of one microbatch. The last stage returns the scalar for backward, or None."""
        start = time.perf_counter()
        part, back = self.round.parts[number], self.round.has_backward
        incoming, _ = self._crossing(number)
        inputs = self._received.get(number, ()) if back else self._received.pop(number, ())
        for x, like in zip(inputs, incoming, strict=True):
            x.requires_grad_(back and like.needs_gradient)
        given = [detached_alias(x) if x.requires_grad else x for x in inputs]
        with self._context.stage_stream(self.round.seed, self.stage_index, number):
            output = self._run_with_caches(part, given)
        outputs = self._last_output(number, output) if self.is_last else tuple(output)
        if back and self._splits:
            outputs = tie(outputs, inputs)
        if back or self._is_sent:
            self._forwards[number] = outputs, inputs
        self._note(Kind.FORWARD, number, start)
        return outputs if not self.is_last else outputs[0] if outputs else None

    def _run_with_caches(self, part: Microbatch, received: Sequence[Tensor]) -> Any:
        if part.caches is None:
            return self._run(part.arguments, received)
        caches = part.caches.arguments()
        output = self._run({**part.arguments, **caches}, received)
        part.caches.keep(caches)
        return output

    def _run(self, arguments: Mapping[str, Any], received: Sequence[Tensor]) -> Any:
        if self._enters_root:
            return self.submod(arguments, received)
        return self._stages.run(self.stage_index, arguments, received)

    def _last_output(self, number: int, output: Any) -> tuple[Tensor, ...]:
        if self.round.keeps_outputs:
            self.round.outputs[number] = output
        loss_of = self.round.parts[number].loss_of
        return (loss_of(output),) if loss_of is not None else ()

    def backward_one_chunk(
        self,
        number: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002 - torch's
        last_backward: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Runs the backward of one microbatch, or its first part if it is not a full backward."""
        if not self.round.has_backward:
            return
        start = time.perf_counter()
        outputs, inputs = self._forwards.pop(number)
        gradients = [torch.ones_like(x) for x in outputs] if self.is_last else self._gradients.pop(number)
        started = [(x, g) for x, g in zip(outputs, gradients, strict=True) if x.requires_grad and g is not None]
        self._before_backward(is_split=not full_backward)
        if full_backward:
            _backward(started)
            found = [x.grad for x in inputs]
        elif not any(x.requires_grad for x in inputs) or not started:
            self._later[number] = lambda: _backward(started)
            found = [None for _ in inputs]
        else:
            found = self._backward_inputs(number, started, inputs)
        if not self.is_first:
            incoming, _ = self._crossing(number)
            self.bwd_cache[number] = tuple(
                None if not like.needs_gradient else torch.zeros_like(x) if g is None else g.contiguous()
                for x, g, like in zip(inputs, found, incoming, strict=True)
            )
            self._received.pop(number, None)
        self._note(Kind.BACKWARD if full_backward else Kind.BACKWARD_INPUT, number, start)

    def _backward_inputs(
        self, number: int, started: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        outputs, gradients = [x for x, _ in started], [g for _, g in started]
        ends = [x.grad_fn for x in outputs]
        found, later = backward_inputs(outputs, gradients, inputs, self.submod.parameters())
        if number not in self._checked:
            check_complete(ends, inputs, later, stage=self.stage_index)
            self._checked.add(number)
        self._later[number] = later
        return found

    def backward_weight_one_chunk(self, number: int, last_backward: bool = False) -> None:  # noqa: FBT001, FBT002
        """Runs the second part of a backward: the gradients of weights."""
        if not self.round.has_backward:
            return
        start = time.perf_counter()
        self._before_backward(is_split=True)
        self._later.pop(number)()
        self._note(Kind.BACKWARD_WEIGHT, number, start)

    def _before_backward(self, *, is_split: bool) -> None:
        """Delays FSDP2's reductions to the end of the schedule, and makes modules hold the graph's parameters.

        Both parts of a backward look up parameters before autograd runs. ZeRO stage 3 has freed them after the forward,
        and the sharded ones are not in the graph: their gradients would be lost silently.
        """
        if not self._is_managed:
            return
        self.submod.set_is_last_backward(False)
        self.submod.set_reshard_after_backward(False)
        self.submod.set_requires_gradient_sync(False)
        for module in self.submod.modules() if is_split else ():
            if isinstance(module, FSDPModule):
                module.unshard()

    def _note(self, kind: Kind, number: int, start: float) -> None:
        if self.round.is_timed:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            action = Action(self.stage_index, kind, number)
            self.round.spans.append(Span(action, start, time.perf_counter()))


def _backward(started: Sequence[tuple[Tensor, Tensor]]) -> None:
    if started:
        torch.autograd.backward([x for x, _ in started], [g for _, g in started])
