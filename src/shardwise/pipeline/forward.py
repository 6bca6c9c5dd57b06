"""`model(**batch)` of a model in stages: every rank passes the same arguments and gets the full output.

# [Note: a forward through a pipeline]
Without gradients the batch passes the stages in one piece, and every rank gets the output. With gradients and targets,
a loop calls `loss = model(**batch).loss` and then `loss.backward()`. Stages cannot wait in between: the backward of the
first microbatch runs before the last forward. So the forward runs the whole schedule and stashes the gradients.
`backward` adds them to `.grad`, times the incoming gradient, so a loop may divide or scale its loss alike on all data
ranks. In training mode the model uses as many microbatches as fill the pipeline, or as requested
(`PipelineRunner.num_microbatches`), if the rows divide. In eval mode it uses one, and computes exactly what the unsplit
model computes on the whole batch, even if that is no sum over rows (the balance of a mixture of experts).

# [Note: gradients released by backward]
Parameters enter the loss's graph as if the loss had been computed from them here. So autograd handles their gradients
as usual: `backward()` adds them to `.grad`, `inputs=` selects some, `torch.autograd.grad` returns them, and hooks on
parameters receive the gradient of the whole batch, once. The schedule's own backwards, of single microbatches, call
none of these hooks.
"""

import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutput

from shardwise.comm.collectives import all_reduce_, host_device
from shardwise.data.batch import TargetWeights, check_divides, count_targets, divide_media, split_rows, target_names
from shardwise.errors import BatchError, ShardwiseError, UnsupportedError
from shardwise.loss.label_use import may_divide
from shardwise.mesh import Mesh
from shardwise.optim.gradients import gradients_of
from shardwise.parameters.registry import Registry, local_part, registry_of
from shardwise.pipeline.outputs import (
    StageCaches,
    asked_outputs,
    broadcast_output,
    check_asked_outputs,
    check_caches,
    merge_outputs,
)
from shardwise.pipeline.runner import PipelineRunner, runner_of
from shardwise.pipeline.stage import Microbatch
from shardwise.runtime.host_masks import cache_of, leave_out_cache
from shardwise.runtime.linear import apply_mixin
from shardwise.runtime.modes import is_checkpointed, refuse_compiled
from shardwise.runtime.outputs import map_fields
from shardwise.runtime.same_batch import agree_over_data, check_same_batch
from shardwise.stages.model import Stages
from shardwise.topology.shape import DATA_AXES, SAME_ROWS_AXES

Kept = list[tuple[Tensor, Tensor]]


@contextmanager
def stashed_grads(model: nn.Module) -> Iterator[Kept]:
    """Context manager: gradients start at None inside; the new ones are in the yielded dict, the old ones restored."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    kept: Kept = []
    for parameter, _ in before:
        parameter.grad = None
    try:
        with _without_hooks([parameter for parameter, _ in before]):
            yield kept
    finally:
        kept += [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    found = [
        hooks for each in parameters for hooks in (each._backward_hooks, each._post_accumulate_grad_hooks) if hooks
    ]
    aside = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(found, aside, strict=True):
            hooks.update(own)


def emit_stashed_grads(loss: Tensor, model: nn.Module, kept: Kept, *, factor: float | Tensor) -> Tensor:
    """Returns `loss`. Its backward gives parameters and inputs the gradients that were kept, once.

    Args:
        kept: what is given a gradient, with the gradient; it is emptied.
        factor: what all gradients are multiplied by, beside the gradient that comes in.
    """
    leaves, gradients = [leaf for leaf, _ in kept], [gradient for _, gradient in kept]
    kept.clear()
    # Something of this graph needs a gradient on every rank, also on one that trains nothing.
    anchor = torch.ones((), requires_grad=True)
    return _ReleaseGradients.apply(loss.detach(), model, gradients, factor, anchor, *leaves)


class _ReleaseGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        model: nn.Module,
        kept: list[Tensor],
        factor: float | Tensor,
        anchor: Tensor,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.model, ctx.kept, ctx.factor = model, kept, factor
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Any, ...]:
        if ctx.kept is None:
            raise RuntimeError("the gradients of this forward have been added already: run another forward")
        _check_equal_factor(incoming, registry_of(ctx.model).mesh)
        factor = incoming * ctx.factor
        for gradient in ctx.kept:
            own = local_part(gradient)
            own.mul_(factor.to(own.device, own.dtype))
        released, ctx.kept = ctx.kept, None  # so that autograd need not copy them
        gradients = gradients_of(ctx.model)
        gradients.note_change()
        Variable._execution_engine.queue_callback(gradients.complete)  # nothing is partial: it says whose they are
        return None, None, None, None, None, *released


def _check_equal_factor(incoming: Tensor, mesh: Mesh) -> None:
    """Raises on every rank if data ranks scale the loss differently: their gradients have been reduced already.

    Communicates: over the data axes, one all-reduce of two numbers.
    """
    if (group := mesh.group(*DATA_AXES)) is None:
        return
    ends = torch.stack([incoming, -incoming]).detach().to(host_device(group, mesh.device))
    all_reduce_(ends, group, largest=True)
    largest, negative_smallest = ends.tolist()
    if largest != -negative_smallest:
        raise UnsupportedError(
            f"a loss that data ranks of {mesh.shape} multiply by other numbers: {-negative_smallest:g} to {largest:g}",
            why="in a pipeline the forward has run the backward, and gradients are reduced over data ranks already",
            fix="use shardwise.TrainStep, which weights data ranks by their targets, or the same number on every rank",
        )


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise UnsupportedError(
            "a gradient of the output of a model in stages other than its loss",
            why="the backward of the stages has run in the forward, or there was no loss to start it from",
            fix="pass labels, and use the loss alone, or shardwise.TrainStep",
        )


def refuse_gradient(x: Tensor) -> Tensor:
    """Returns `x` with a backward that raises UnsupportedError. Non-float values are returned unchanged."""
    if not x.is_floating_point():
        return x
    with torch.enable_grad():
        refused: Tensor = _Refused.apply(x, torch.ones((), requires_grad=True))
    return refused


_MOST_PER_STAGE = 4  # microbatches per stage that a training forward takes: a fifth of the time is bubble then


def apply_pipeline(model: nn.Module, registry: Registry) -> None:
    """Makes a call of `model` run all stages. Does nothing without stages.

    Communicates: creates a group along pp.
    """
    if registry.stages is None:
        return
    assert registry.plan.pipeline is not None
    registry.context.same_rows = registry.mesh.group(*SAME_ROWS_AXES)
    runner = PipelineRunner(model, registry, registry.plan.pipeline, registry.stages)
    runner.asked_outputs = asked_outputs(model, {})
    apply_mixin(model, Pipelined)
    if registry.stages.encoder:
        apply_mixin(model.get_submodule(registry.stages.encoder), PipelinedEncoder)


class Pipelined:
    """Mixin: a call runs the whole pipeline (see [Note: a forward through a pipeline])."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; every rank of the pipeline must call it with the same arguments.

        Communicates: over tp and pp, one all-gather of 40 bytes per rank; in training with several data ranks, another
        one over the data axes; what the stages do; the output, over pp.
        """
        model: Any = self
        if torch.compiler.is_compiling():
            self.compile()
        registry = registry_of(model)
        stages: Any = registry.stages
        if stages.current is not None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if is_checkpointed():
            raise UnsupportedError(
                f"a {type(model).__name__} in stages inside of torch.utils.checkpoint",
                why="it would run the schedule again, while ranks wait for gradients",
                fix='split it with recompute=shardwise.Recompute(mode="full"), which recomputes every block',
            )
        runner = runner_of(model)
        assert runner is not None
        return _Forward(model, runner, registry, args, kwargs).run()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError: a stage ends inside of the model's forward, so there is no whole graph."""
        refuse_compiled(f"a {type(self).__name__} in stages", why="a stage ends inside of the model's forward")


class PipelinedEncoder:
    """Mixin: a direct call runs the whole pipeline, with a decoder input of one token; returns the encoder's output.

    Later forwards with that output skip the encoder's layers.
    """

    _stages: Stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Like the encoder's own call; every rank of the pipeline must make it.

        Returns:
            The last hidden states, on every rank.

        Communicates: what a forward of the model does.
        """
        if self._stages.current is not None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        model, own = self._stages.model, inspect.signature(self.forward).parameters  # type: ignore[attr-defined]
        given = {**dict(zip(own, args, strict=False)), **kwargs}
        taken = inspect.signature(model.forward).parameters.keys() - {"return_dict", *target_names(model)}
        given = {name: value for name, value in given.items() if name in taken}
        inputs: Tensor = next(value for value in given.values() if isinstance(value, Tensor))
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        first = torch.full((inputs.shape[0], 1), start, device=inputs.device)
        output = model(**given, decoder_input_ids=first, use_cache=False)
        return BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)


class _Forward:
    """One call of a model in stages."""

    def __init__(
        self, model: nn.Module, runner: PipelineRunner, registry: Registry, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.model, self.runner, self.registry = model, runner, registry
        self.arguments = named_call(model, args, kwargs)
        asked = self.arguments.pop("return_dict", None)
        self.as_tuple = not (getattr(getattr(model, "config", None), "return_dict", True) if asked is None else asked)
        if self.as_tuple:
            self.arguments["return_dict"] = True
        self.targets = [name for name in target_names(model) if isinstance(self.arguments.get(name), Tensor)]
        # Not whether this rank has anything to train: all of them must choose alike.
        self.learns = bool(self.targets) and torch.is_grad_enabled()
        if "use_cache" in inspect.signature(model.forward).parameters and cache_of(self.arguments) is None:
            leave_out_cache(model, self.arguments)

    def run(self) -> Any:
        """Returns the output of the whole model."""
        rows = self._agree()
        output = self._train(rows) if self.learns else self._evaluate()
        return output.to_tuple() if self.as_tuple else output

    def _evaluate(self) -> Any:
        num_stages = len(self.runner.stages.own)
        caches = StageCaches(self.arguments, num_stages_per_rank=num_stages, device=self.registry.mesh.device)
        part = Microbatch(self.arguments, caches=caches if caches else None)
        done = self.runner.run([part], self.runner.in_order(1), has_backward=False, keeps_outputs=True)
        caches.advance()
        return self._hand_out(done.outputs.get(0), later=False)

    def _agree(self) -> tuple[int, ...]:
        """Raises the same error on all ranks unless all can make this call. Returns the rows of each rank, or 0."""
        mesh, fault = self.registry.mesh, None
        also = {"model.training": self.model.training, "gradients": self.learns, "the model": self.runner.name}
        try:
            trained = [any(each.requires_grad for each in self.model.parameters()), mesh.coord("pp")]
            ranks = check_same_batch(self.arguments, self.registry.context, also=also, numbers=trained)
            if self.learns:
                gradients_of(self.model).note_trained(ranks)
            self._check()
        except ShardwiseError as error:
            fault = error
        rows = next((self.arguments[name].shape[:1].numel() for name in self.targets), 0)
        joins = self.learns or (fault is not None and fault.at == "gradients")
        if not joins:
            if fault is not None:
                raise fault
            return (rows,)
        fields = {name: repr(value) for name, value in also.items()}
        single_rows = split_rows(self.arguments, rows, rows) if fault is None and len(self.targets) > 1 else ()
        is_uneven = False
        if fault is None:
            try:
                check_divides(self.model, self.arguments, single_rows, 2)
                divide_media(self.model, self.arguments, rows, rows)
            except (BatchError, UnsupportedError):  # all ranks take the batch whole then
                is_uneven = True
        numbers = agree_over_data(mesh, fields, fault=fault, numbers=[rows, is_uneven]).wait()
        return tuple(0 if has_uneven else rows for rows, has_uneven in numbers)

    def _check(self) -> None:
        """Raises the same error on every rank if the call asks for something that stages do not support."""
        if self.learns and self.registry.local_state:
            raise UnsupportedError(
                f"a training forward of a hand-written {type(self.model).__name__} in stages",
                why="backward has run on other ranks before the loss is known here",
                fix="call run_train, which runs forward and backward",
            )
        kind = self.registry.mesh.device.type
        if self.learns and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
            raise UnsupportedError(
                f"a training forward of a {type(self.model).__name__} in stages under float16 autocast",
                why="backward has run before a GradScaler scales the loss, and small gradients have become zero",
                fix='split it with precision=shardwise.Precision(compute="float16"), which scales the loss itself, or '
                "autocast to bfloat16",
            )
        check_asked_outputs(self.model, self.arguments, self.runner.asked_outputs)
        given = self.arguments.items() if self.learns else ()
        nested = (
            name
            for name, value in given
            if not isinstance(value, Tensor | Cache)
            and any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(value))
        )
        if (holder := next(nested, None)) is not None:
            raise UnsupportedError(
                f"a gradient of what {holder} holds, in a {type(self.model).__name__} in stages",
                why="the backward of the stages runs in the forward, and goes no further than the tensors it is given",
                fix="pass the model's own inputs, or compute the encoder's output under torch.no_grad()",
            )
        cache = cache_of(self.arguments)
        if self.learns and isinstance(cache, Cache) and cache.get_seq_length():
            raise UnsupportedError(
                f"a training forward of a {type(self.model).__name__} in stages that goes on from keys and values",
                why="microbatches have rows of their own, and no gradient would reach what is in the cache",
                fix="pass all tokens, or a prefix as inputs_embeds",
            )
        check_caches(self.arguments, num_stages_per_rank=len(self.runner.stages.own))
        if self.arguments.get("use_cache") and cache is None:
            raise UnsupportedError(
                f"use_cache=True of a {type(self.model).__name__} in stages, without a cache",
                why="every stage fills its own layers, of a cache that the caller keeps",
                fix="pass a transformers.DynamicCache(config=model.config), as generate() does",
            )

    def _hand_out(self, output: Any, *, later: bool) -> Any:
        runner = self.runner
        return broadcast_output(
            output,
            self.arguments,
            self.registry.context,
            runner.group,
            source=runner.last_rank,
            later=later,
            change=refuse_gradient if torch.is_grad_enabled() else None,
        )

    def _train(self, rows_of_all: tuple[int, ...]) -> Any:
        batch, weights = self._microbatches(rows_of_all)
        given = [name for name, value in self.arguments.items() if isinstance(value, Tensor) and value.requires_grad]
        parts = [dict(batch.arguments(number)) for number in range(len(batch))]
        for part in parts:
            part |= {name: part[name].detach().clone().requires_grad_() for name in given}
        count = len(parts)
        schedule = self.runner.fitting(count)
        gradients = gradients_of(self.model)
        scale = gradients.loss_scale.factor if gradients.loss_scale is not None else 1.0
        factors = [weight * scale * gradients.share for weight in weights]
        losses = [functools.partial(_loss_of, factor=factor) for factor in factors]
        microbatches = [Microbatch(*each) for each in zip(parts, losses, strict=True)]
        with stashed_grads(self.model) as kept, gradients.no_sync():
            done = self.runner.run(microbatches, schedule, keeps_outputs=True)

        def detached(name: str, value: Any) -> Any:
            return value.detach() if isinstance(value, Tensor) else value

        outputs = [map_fields(done.outputs[number], detached) for number in sorted(done.outputs)]
        output = merge_outputs(outputs, weights) if outputs else None  # else another rank has the last stage
        output = self._hand_out(output, later=self.model.training)
        for name in given:
            full = torch.cat(
                [torch.zeros_like(x) if x.grad is None else x.grad for x in (part[name] for part in parts)]
            )
            all_reduce_(full, self.runner.group)
            kept.append((self.arguments[name], full))
        if not given and not self.runner.trains:  # as of any model of which nothing is trained
            output["loss"] = output.loss.detach()
            return output
        output["loss"] = emit_stashed_grads(output.loss, self.model, kept, factor=1 / scale)
        return output

    def _microbatches(self, rows_of_all: tuple[int, ...]) -> tuple[TargetWeights, list[float]]:
        """Returns the microbatches, equally many on every data rank, and the factor of each loss."""
        rows = self.arguments[self.targets[0]].shape[0]
        whole = TargetWeights([self.arguments], [1], 1), [1.0]
        is_callers = hasattr(self.model, "_loss_function")  # maybe no mean over targets
        if not self.model.training or is_callers or not may_divide(self.model) or not all(rows_of_all):
            return whole
        asked, most = self.runner.num_microbatches, _MOST_PER_STAGE * self.runner.plan.num_stages
        numbers = range(2, min(*rows_of_all, rows, most) + 1) if asked is None else [asked]
        divides = math.gcd(*rows_of_all)
        fitting = [n for n in numbers if n > 1 and divides % n == 0 and (asked or self.runner.takes(n))]
        if not fitting:
            return whole
        runs = divide_media(self.model, self.arguments, rows, fitting[-1])
        parts = split_rows(self.arguments, rows, fitting[-1], runs)
        counts = [count_targets(self.model, part) for part in parts]
        sums = self.arguments.get("num_items_in_batch") is not None  # the loss is a sum, divided by the caller's number
        if sums or not any(counts):  # a loss over no targets is what the model says it is
            count = len(parts)
            return TargetWeights(parts, [1] * count, count), [1.0 if sums else 1 / count] * count
        batch = TargetWeights(parts, counts, sum(counts))
        return batch, [float(batch.weight(number)) for number in range(len(batch))]


def named_call(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of `model`, positional ones too, by the names in its forward."""
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    variadic = {name for name, each in signature.parameters.items() if each.kind is inspect.Parameter.VAR_KEYWORD}
    found = {name: value for name, value in bound.arguments.items() if name not in variadic}
    for name in variadic:
        found |= bound.arguments.get(name, {})
    return found


def _loss_of(output: Any, *, factor: float | Tensor) -> Tensor:
    """Returns the scalar on which the backward of a microbatch is called."""
    loss: Tensor = output.loss
    return loss if not isinstance(factor, Tensor) and factor == 1.0 else loss * factor
