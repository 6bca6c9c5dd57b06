"""The output embedding (head) with logits split over the vocabulary.

85 heads of transformers call `F.cross_entropy` directly instead of `loss_function`. So a torch function mode, active
from the head to the end of the forward, intercepts that call and computes it from the local parts.
"""

import logging
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache, EncoderDecoderCache

from shardwise.comm.collectives import as_dtensor, copy_to_region, gather_full, scale_gradient
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.loss.cross_entropy import LossOptions, split_cross_entropy
from shardwise.loss.logits import DeferredLogits, SplitLogits, as_logits, go_on, make
from shardwise.runtime.arguments import Arguments, edit_arguments
from shardwise.runtime.context import SplitContext
from shardwise.runtime.modes import refuse_compiled
from shardwise.runtime.outputs import map_fields
from shardwise.runtime.same_batch import check_same_batch

logger = logging.getLogger("shardwise.loss")


class SplitLossMode(TorchFunctionMode):
    """Function mode that computes `F.cross_entropy` of split logits from the local parts.

    Other operations on the logits run on the parts too, as `DTensor` operations. If `DTensor` does not support an
    operation, the logits are gathered, which costs memory and an all-gather, and is logged once.
    """

    def __init__(self, context: SplitContext) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(isinstance(value, DeferredLogits) for value in tensors):
            done = go_on(func, args, kwargs)
            if done is not NotImplemented:
                return done
            with self:
                return func(*make(args), **make(kwargs))
        if not any(isinstance(value, DTensor) for value in tensors):
            return func(*args, **kwargs)
        if not any(isinstance(value, SplitLogits) and value.is_gathered for value in tensors):
            logits = args[0] if args else kwargs.get("input")
            if func is F.cross_entropy and logits.placements == (Shard(_class_dim(logits)),):
                return _cross_entropy(self.context, *args, **kwargs)
            try:
                return self._on_parts(func, args, kwargs)
            except (RuntimeError, NotImplementedError) as error:
                self._warn(func, error)
        return func(*tree_map(_full, args), **tree_map(_full, kwargs))

    def _on_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs `func` on split logits and replicated tensors, such as a bias or a row mask."""

        def split(value: Any) -> Any:
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                return DTensor.from_local(value, self.context.mesh, [Replicate()], run_check=False)
            return value

        with torch._C.DisableTorchFunctionSubclass():
            out = func(*tree_map(split, args), **tree_map(split, kwargs))
        return tree_map(lambda value: as_logits(value, self.context), out)

    def _warn(self, func: Any, error: Exception) -> None:
        name = getattr(func, "__name__", str(func))
        if name not in self.context.gathered_for:
            self.context.gathered_for.add(name)
            logger.warning(
                "%s gathers the logits of every forward with labels, because %s cannot be computed on parts: %s",
                self.context.model_name,
                name,
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )


def _full(value: Any) -> Any:
    if isinstance(value, SplitLogits):
        return value.gather_parts()  # every rank's forward does the same
    return value.full_tensor() if isinstance(value, DTensor) else value


def _cross_entropy(context: SplitContext, input: DTensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    """Computes `F.cross_entropy`, with its signature, of split logits."""
    if target.is_floating_point():  # class probabilities: rare, and as large as the logits themselves
        return F.cross_entropy(_full(input), target, *args, **kwargs)
    dim = _class_dim(input)
    return split_cross_entropy(
        input.to_local().movedim(dim, -1),
        target,
        axis=context.tp,
        num_classes=input.shape[dim],
        options=LossOptions.of(*args, **kwargs),
    )


def _class_dim(logits: Tensor) -> int:
    return 0 if logits.ndim == 1 else 1


# Values replicated inside a region that leave it another way than through its edge.
_SIDE_OUTPUTS = ("router_logits", "encoder_router_logits", "decoder_router_logits")


def install_head(head: nn.Module, vocabulary_size: int, context: SplitContext) -> None:
    """Makes `head` compute this rank's part of the logits.

    If the model computes its loss, the logits stay split, as `DTensor(Shard(-1))` of the true vocabulary. Else they are
    gathered, so that `generate()` and a user's own loss see full logits.

    Communicates: over tp, one all-reduce of the input's gradient in backward; without a loss inside also one all-gather
    of the logits in forward.
    """
    axis = context.tp

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (copy_to_region(args[0], axis.group), *args[1:])

    def leave(module: nn.Module, args: Any, local: Any) -> Any:
        if not isinstance(local, Tensor):  # scores of tokens, which the ranks have computed together
            return local
        if not context.state.keep_logits_split:
            return gather_full(local, axis.group, dim=local.ndim - 1, sizes=axis.even_sizes(vocabulary_size))
        if context.state.loss_mode is None:
            context.state.loss_mode = SplitLossMode(context)
            context.state.loss_mode.__enter__()
        if isinstance(local, DeferredLogits):
            return local.split_over(vocabulary_size, finish)
        return finish(local)

    def finish(local: Tensor) -> Tensor:
        shape = (*local.shape[:-1], vocabulary_size)
        return as_logits(as_dtensor(local, context.mesh, [Shard(local.ndim - 1)], shape), context)

    head.register_forward_pre_hook(enter)
    head.register_forward_hook(leave)


_MASKS = ("attention_mask", "encoder_attention_mask", "decoder_attention_mask")


def install_loss(model: nn.Module, context: SplitContext) -> None:
    """Keeps logits split in forwards of `model` with labels, and ends the loss mode after each forward.

    Communicates: before each forward, what `check_same_batch` does.
    """
    context.model_name = type(model).__name__
    filled: WeakSet[Cache] = WeakSet()  # by forwards of this model
    num_parts = context.tp.size

    def enter(module: nn.Module, arguments: Arguments) -> None:
        for name in _MASKS:
            mask = arguments.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1 and num_parts > 1:
                raise UnsupportedError(
                    f"a mask for each head, {name} {list(mask.shape)} of a model that is split over tp={num_parts}",
                    why="it has a mask for every head of the model, and a rank computes with its own heads alone",
                    fix="pass a mask for all heads alike [rows, 1, queries, keys], or use a layout without tp",
                )
        context.state.keep_logits_split = arguments.get("labels") is not None and context.mesh is not None
        if context.state.keep_logits_split and torch.compiler.is_compiling():
            what = f"a {context.model_name} that is split over tp, with labels"
            refuse_compiled(what, why="the loss over split logits communicates, which torch.compile cannot trace")
        if context.mesh is not None:
            also: dict[str, Any] = {"model.training": module.training, "gradients": torch.is_grad_enabled()}
            also["dtype of parameters"] = next(module.parameters()).dtype
            given = {name: value for name, value in arguments.items() if not isinstance(value, Cache)}
            check_same_batch(given, context, also=also)
        if num_parts > 1 and torch.is_grad_enabled():
            for name, value in arguments.items():
                if isinstance(value, Cache):
                    _check_prefix(name, value, filled)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        left = context.state.pending_sum is not None
        context.state.end()
        if left and output is not None:
            raise LayoutError(
                "a partial sum was deferred to a block that did not run",
                why="the plan reduces what parallel blocks compute together, but the forward ran only one of them",
                fix="give the first of them the style without _into",
            )
        return map_fields(output, lambda name, value: _returned(value, filled))

    edit_arguments(model, enter)
    model.register_forward_hook(leave, always_call=True)


def install_side_outputs(base: nn.Module, context: SplitContext) -> None:
    """Divides the gradients of router logits by the number of tp ranks.

    Router logits are replicated but computed inside a region, where gradients are partial. An auxiliary loss outside of
    the region gives every rank their full gradient.
    """

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        def share(name: str, value: Any) -> Any:
            if name not in _SIDE_OUTPUTS or not isinstance(value, tuple):
                return value
            return tuple(scale_gradient(x, 1 / context.tp.size) if isinstance(x, Tensor) else x for x in value)

        return map_fields(output, share)

    base.register_forward_hook(leave)


def _check_prefix(name: str, cache: Cache, filled: WeakSet[Cache]) -> None:
    """Raises `UnsupportedError` if the cache holds trained keys or values that the caller has made."""
    if cache in filled or not cache.get_seq_length():
        filled.add(cache)
        return
    caches = (
        (cache.self_attention_cache, cache.cross_attention_cache)
        if isinstance(cache, EncoderDecoderCache)
        else (cache,)
    )
    held = (value for each in caches for layer in each.layers for value in vars(layer).values())
    if any(isinstance(value, Tensor) and value.requires_grad for value in held):
        raise UnsupportedError(
            f"trained keys and values in {name}, of a model that is split over tp",
            why="each rank attends with its own heads, so that it would find a part of their gradient alone",
            fix="pass a prefix as inputs_embeds, or use a layout without tp",
        )


def _returned(value: Any, filled: WeakSet[Cache]) -> Any:
    """Converts one output of the model: split logits stay, other DTensors (another kind of loss) become full."""
    if isinstance(value, Cache):
        filled.add(value)
    return value.full_tensor() if isinstance(value, DTensor) and not isinstance(value, SplitLogits) else value
