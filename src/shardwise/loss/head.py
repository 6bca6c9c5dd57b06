"""The output embedding (head) with logits split over the vocabulary."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import Cache, EncoderDecoderCache

from shardwise.comm.collectives import as_dtensor, copy_to_region, gather_full, scale_gradient
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.loss.deferred_logits import DeferredLogits
from shardwise.loss.logits import SplitLogits, as_logits
from shardwise.loss.mode import SplitLossMode
from shardwise.runtime.arguments import Arguments, edit_arguments
from shardwise.runtime.context import SplitContext
from shardwise.runtime.modes import refuse_compiled
from shardwise.runtime.outputs import map_fields
from shardwise.runtime.same_batch import check_same_batch

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

    def leave(module: nn.Module, args: Any, local: Tensor) -> Tensor:
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
    """Converts one output of the model: split logits stay, other DTensors (a loss that is no cross-entropy) become
    full.
    """
    if isinstance(value, Cache):
        filled.add(value)
    return value.full_tensor() if isinstance(value, DTensor) and not isinstance(value, SplitLogits) else value
