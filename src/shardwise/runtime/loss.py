"""Cross-entropy over logits that are split along the vocabulary.

85 transformers heads call `F.cross_entropy` themselves instead of `loss_function`, so that call is where all of them
are served: from the head to the end of the model's forward a torch-function mode is active, which computes
cross-entropy on split logits from the local parts.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.comm.operations import all_gather_single
from shardwise.runtime.checks import check_index
from shardwise.runtime.context import SplitContext
from shardwise.runtime.logits import SplitLogits, as_logits

__all__ = ["SplitLossMode", "split_cross_entropy"]

logger = logging.getLogger("shardwise.loss")


class SplitLossMode(TorchFunctionMode):
    """While active, `F.cross_entropy` of logits split along the class dim is computed from the split parts, and what is
    done to the logits on the way there is done to the parts.

    What `DTensor` cannot do to parts is done to full logits: they are gathered, which costs memory and an all-gather,
    and is logged once.
    """

    def __init__(self, context: SplitContext) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not any(isinstance(value, DTensor) for value in tensors):
            return func(*args, **kwargs)
        if not any(isinstance(value, SplitLogits) and value.is_gathered for value in tensors):
            logits = args[0] if args else kwargs.get("input")
            if func is F.cross_entropy and logits.placements == (Shard(_class_dim(logits)),):
                return _intercepted(self.context, *args, **kwargs)
            try:
                return self._on_parts(func, args, kwargs)
            except (RuntimeError, NotImplementedError) as error:
                self._warn(func, error)
        return func(*tree_map(_full, args), **tree_map(_full, kwargs))

    def _on_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs `func` on split logits and full tensors: a bias that is added, a mask that picks rows."""

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


def _intercepted(  # noqa: PLR0913 - torch's own signature
    context: SplitContext,
    input: DTensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` with its own signature, on split logits."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    if target.is_floating_point():  # class probabilities: rare, and as large as the logits themselves
        return F.cross_entropy(
            _full(input), target, weight=weight, reduction=reduction, label_smoothing=label_smoothing
        )
    dim = _class_dim(input)
    local = input.to_local().movedim(dim, -1)
    losses, weights = split_cross_entropy(
        local.reshape(target.numel(), local.shape[-1]),
        target.reshape(-1),
        context=context,
        num_classes=input.shape[dim],
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    if reduction == "mean":
        total = weights.sum()
        # Over no targets the mean is NaN, as in torch, and its gradient zero: 0/0 would make that NaN too.
        nothing = torch.where(total == 0, torch.nan, 0.0)
        return losses.sum() / torch.where(total == 0, 1.0, total) + nothing
    return losses.sum() if reduction == "sum" else losses.reshape(target.shape)


def split_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    context: SplitContext,
    num_classes: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every row, computed in float32 from this rank's classes.

    Args:
        logits: `[rows, classes]`, per rank `[rows, classes of this rank]` in the order of `torch.chunk`; not modified.
        target: int `[rows]`, the same on every tp rank.
        weight: `[classes]`, full on every rank.

    Returns:
        Losses `[rows]` and the weights `[rows]` by whose sum their mean is taken, both 0 where the target is ignored.

    Communicates: over tp, one all-gather of three values a row and rank (four with label smoothing); nothing backward.
    """
    return _SplitCrossEntropy.apply(logits, target, context, num_classes, weight, ignore_index, label_smoothing)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        context: SplitContext,
        num_classes: int,
        weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        kept = target != ignore_index
        _check_targets(target, kept, num_classes)
        start = sum(context.even_sizes(num_classes)[: context.coord])
        rows, local_classes = logits.shape
        own_weight = None if weight is None else weight[start : start + local_classes].float()
        position = target - start
        mine = kept & (position >= 0) & (position < local_classes)
        position = position.clamp(0, max(0, local_classes - 1))

        values = logits.float()
        lowest = torch.finfo(values.dtype).min  # of a rank without classes, or whose logits are all minus infinity
        largest = values.amax(-1).clamp_(min=lowest) if local_classes else values.new_full((rows,), lowest)
        shifted = values - largest.unsqueeze(-1)
        picked = shifted.gather(-1, position.unsqueeze(-1)).squeeze(-1) if local_classes else torch.zeros_like(largest)
        own = [largest, picked]
        if label_smoothing:
            own.append((shifted if own_weight is None else shifted * own_weight).sum(-1))
        own.append(shifted.exp_().sum(-1))
        parts = _all_gathered(torch.stack(own), context)
        # What a rank has is relative to its own largest logit; `below` is how far that is below the largest of all.
        largest = parts[:, 0].amax(0)
        below = parts[:, 0] - largest
        log_total = (parts[:, -1] * below.exp()).sum(0).log()
        sizes = context.even_sizes(num_classes)
        owner = target.clamp(0, num_classes - 1) // sizes[0]
        picked = torch.gather(parts[:, 1] + below, 0, owner.unsqueeze(0)).squeeze(0)

        row_weight = kept.float() if weight is None else weight[target.clamp(min=0)].float() * kept
        losses = (log_total - picked) * row_weight
        total_weight = float(num_classes) if weight is None else weight.float().sum()
        if label_smoothing:
            each = values.new_ones(num_classes) if weight is None else weight.float()
            shares = torch.stack([part.sum() for part in each.split(sizes)])
            spread = (log_total * total_weight - (parts[:, 2] + below * shares.unsqueeze(-1)).sum(0)) * kept
            losses = losses * (1 - label_smoothing) + spread * (label_smoothing / num_classes)
        # Of the vocabulary-sized tensors only the logits are kept; the softmax is recomputed in backward.
        ctx.save_for_backward(logits, largest + log_total, position, mine, kept, row_weight, own_weight)
        ctx.label_smoothing, ctx.num_classes, ctx.total_weight = label_smoothing, num_classes, total_weight
        ctx.mark_non_differentiable(row_weight)
        return losses, row_weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_total, position, mine, kept, row_weight, own_weight = ctx.saved_tensors
        smoothing = ctx.label_smoothing
        hard = gradient * row_weight * (1 - smoothing)
        soft = gradient * kept * (smoothing / ctx.num_classes)
        result = (logits.float() - log_total.unsqueeze(-1)).exp_()
        result *= (hard + soft * ctx.total_weight).unsqueeze(-1)
        if logits.shape[-1]:
            result.scatter_add_(-1, position.unsqueeze(-1), (-hard * mine).unsqueeze(-1))
        if smoothing:
            result -= soft.unsqueeze(-1) * (1.0 if own_weight is None else own_weight)
        return result.to(logits.dtype), None, None, None, None, None, None


def _all_gathered(x: Tensor, context: SplitContext) -> Tensor:
    """Every rank's `x`, `[ranks, *x.shape]`."""
    if context.group is None:
        return x.unsqueeze(0)
    parts = x.new_empty(context.size, *x.shape)
    all_gather_single(parts.flatten(0, 1), x, context.group)
    return parts


def _check_targets(target: Tensor, kept: Tensor, num_classes: int) -> None:
    # A target of no rank would come back as a silent loss; where checking would stall a GPU, the device checks.
    valid = (~kept | ((target >= 0) & (target < num_classes))).all()

    def say() -> str:
        bad = target[kept & ((target < 0) | (target >= num_classes))]
        return f"Target {int(bad[0])} is out of bounds: there are {num_classes} classes"

    check_index(valid, "a target is outside the classes", say)


def _class_dim(logits: Tensor) -> int:
    return 0 if logits.ndim == 1 else 1
