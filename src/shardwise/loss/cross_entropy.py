"""Cross-entropy from this rank's classes, given split logits or the input of the head.

# [Note: the loss without logits]
For 2 x 4096 tokens and a vocabulary of 128 thousand, the logits in the model's dtype, in float32, and their gradient
take 12 bytes per element: 12.6 GB. They are never needed all at once. `head_cross_entropy` multiplies a chunk of rows
with the head at a time and keeps three sums per row. Backward multiplies them again. If the head is trained, backward
takes all rows with a chunk of classes at a time, so that no gradient of the head accumulates over chunks. This costs
one product with the head more than with logits, and at most two tensors of `CHUNK_ELEMENTS` live at a time. Ranks
exchange the sums of all rows in one collective, as for logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.agree import all_reduce_int
from shardwise.comm.collectives import all_gather_single
from shardwise.runtime.context import Axis
from shardwise.runtime.linear import check_index

CHUNK_ELEMENTS = 2**26  # logits that are made at a time where they are not needed together: 256 MiB in float32

Steps = Sequence[Callable[[Tensor], Tensor]]  # elementwise operations from the head to the loss


@dataclass(frozen=True)
class Head:
    """Linear layer that makes the logits.

    Attributes:
        weight: `[classes, features]`, per rank `[classes of this rank, features]`.
        bias: `[classes]`, split alike; None if there is none.
        steps: elementwise functions that are applied to the logits before the loss.
    """

    weight: Tensor
    bias: Tensor | None
    steps: Steps = ()


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of `F.cross_entropy`. `weight` `[classes]` is full on every rank."""

    weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @classmethod
    def of(
        cls,
        weight: Tensor | None = None,
        size_average: bool | None = None,  # noqa: FBT001 - torch's own signature
        ignore_index: int = -100,
        reduce: bool | None = None,  # noqa: FBT001
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> "LossOptions":
        """Returns the options of a call, in the order in which `F.cross_entropy` takes them after the target."""
        if size_average is not None or reduce is not None:
            reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
        return cls(weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)

    def reduced(self, losses: Tensor, row_weights: Tensor, shape: torch.Size) -> Tensor:
        """Reduces the losses of rows like `F.cross_entropy`; unreduced losses get `shape`."""
        if self.reduction == "mean":
            total = row_weights.sum()
            # Over no targets the mean is NaN, as in torch, and its gradient zero: 0/0 would make that NaN too.
            nothing = torch.where(total == 0, torch.nan, 0.0)
            return losses.sum() / torch.where(total == 0, 1.0, total) + nothing
        return losses.sum() if self.reduction == "sum" else losses.reshape(shape)


_DEFAULTS = LossOptions()


def split_cross_entropy(
    logits: Tensor, target: Tensor, *, axis: Axis, num_classes: int, options: LossOptions = _DEFAULTS
) -> Tensor:
    """Returns the cross-entropy of split logits, computed in float32.

    Args:
        logits: `[..., classes]`, per rank `[..., classes of this rank]` in the order of `torch.chunk`; not modified.
        target: int `[...]`, the same on every tp rank.

    Communicates: over tp, one all-gather of three values per row and rank (four with label smoothing) in forward.
    """
    width = logits.shape[-1]
    targets = _Targets.read(target.reshape(-1), width, axis, num_classes, options)
    losses: Tensor = _SplitCrossEntropy.apply(logits.reshape(target.numel(), width), targets, axis)
    return options.reduced(losses, targets.row_weight, target.shape)


def cross_entropy_of_parts(logits: Tensor, target: Tensor, *, axis: Axis, options: LossOptions = _DEFAULTS) -> Tensor:
    """Computes `split_cross_entropy` when only the ranks together know the number of classes.

    Communicates: over tp, one all-reduce of one integer, and what `split_cross_entropy` does.
    """
    number = all_reduce_int(logits.shape[-1], axis.group, logits.device)
    return split_cross_entropy(logits, target, axis=axis, num_classes=number, options=options)


def head_cross_entropy(
    hidden: Tensor, head: Head, target: Tensor, *, axis: Axis, num_classes: int, options: LossOptions = _DEFAULTS
) -> Tensor:
    """Computes `split_cross_entropy` of the logits that `head` makes of `hidden`; see [Note: the loss without logits].

    Args:
        hidden: `[rows, features]`, the same on every tp rank.

    Communicates: what `split_cross_entropy` does.
    """
    targets = _Targets.read(target, head.weight.shape[0], axis, num_classes, options)
    losses: Tensor = _HeadCrossEntropy.apply(hidden, head.weight, head.bias, targets, axis, tuple(head.steps))
    return options.reduced(losses, targets.row_weight, target.shape)


@dataclass(frozen=True)
class _Targets:
    """Targets from this rank's view, tensors of shape `[rows]`, and class weights.

    Attributes:
        kept: whether the target is not ignored.
        position: index of the target among this rank's classes, clamped.
        is_own: whether the target is one of this rank's classes.
        owner: rank that has the target's class.
        row_weight: weight of the row's loss.
        own_weight: weights of this rank's classes.
        shares: sum of the class weights of each rank.
    """

    kept: Tensor
    position: Tensor
    is_own: Tensor
    owner: Tensor
    row_weight: Tensor
    own_weight: Tensor | None
    shares: Tensor
    num_classes: int
    smoothing: float

    @classmethod
    def read(cls, target: Tensor, num_local: int, axis: Axis, num_classes: int, options: LossOptions) -> "_Targets":
        weight, smoothing = options.weight, options.label_smoothing
        kept = target != options.ignore_index
        _check_targets(target, kept, num_classes)
        sizes = axis.even_sizes(num_classes)
        start = sum(sizes[: axis.coord])
        position = target - start
        ones = torch.ones(num_classes if smoothing else 0, device=target.device)
        class_weights = ones if weight is None else weight.detach().float()
        return cls(
            kept=kept,
            position=position.clamp(0, max(0, num_local - 1)),
            is_own=kept & (position >= 0) & (position < num_local),
            owner=target.clamp(0, num_classes - 1) // sizes[0],
            row_weight=kept.float() if weight is None else class_weights[target.clamp(min=0)] * kept,
            own_weight=None if weight is None else class_weights[start : start + num_local],
            shares=torch.stack([part.sum() for part in class_weights.split(sizes)]) if smoothing else class_weights[:0],
            num_classes=num_classes,
            smoothing=smoothing,
        )

    def among(self, classes: slice) -> "_Targets":
        """Returns the targets relative to a slice of this rank's classes."""
        number, position = classes.stop - classes.start, self.position - classes.start
        return replace(
            self,
            position=position.clamp(0, max(0, number - 1)),
            is_own=self.is_own & (position >= 0) & (position < number),
            own_weight=None if self.own_weight is None else self.own_weight[classes],
        )

    def sums(self, values: Tensor, rows: slice) -> Tensor:
        """Returns this rank's statistics of some rows, `[3 or 4, rows]`: maximum, target minus maximum, with smoothing
        the weighted sum minus maximum, and the sum of exponentials relative to the maximum. Overwrites `values`
        (float32).
        """
        lowest = torch.finfo(values.dtype).min  # of a rank without classes, or whose logits are all minus infinity
        has_classes = values.shape[-1] > 0
        largest = values.amax(-1).clamp_(min=lowest) if has_classes else values.new_full(values.shape[:1], lowest)
        values -= largest.unsqueeze(-1)
        position = self.position[rows].unsqueeze(-1)
        picked = values.gather(-1, position).squeeze(-1) if has_classes else torch.zeros_like(largest)
        found = [largest, picked]
        if self.smoothing:
            found.append((values if self.own_weight is None else values * self.own_weight).sum(-1))
        found.append(values.exp_().sum(-1))
        return torch.stack(found)

    def losses(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the losses and log-sum-exps of all rows from all ranks' statistics `[ranks, 3 or 4, rows]`."""
        # What a rank has is relative to its own largest logit; `below` is how far that is below the largest of all.
        largest = parts[:, 0].amax(0)
        below = parts[:, 0] - largest
        log_total = (parts[:, -1] * below.exp()).sum(0).log()
        picked = torch.gather(parts[:, 1] + below, 0, self.owner.unsqueeze(0)).squeeze(0)
        losses = (log_total - picked) * self.row_weight
        if self.smoothing:
            spread = log_total * self.shares.sum() - (parts[:, 2] + below * self.shares.unsqueeze(-1)).sum(0)
            losses = losses * (1 - self.smoothing) + spread * self.kept * (self.smoothing / self.num_classes)
        return losses, largest + log_total

    def gradient(self, values: Tensor, log_total: Tensor, incoming: Tensor, rows: slice) -> Tensor:
        """Returns the gradient of some rows' logits. Overwrites `values`, the logits in float32."""
        hard = incoming[rows] * self.row_weight[rows] * (1 - self.smoothing)
        soft = incoming[rows] * self.kept[rows] * (self.smoothing / self.num_classes)
        values -= log_total[rows].unsqueeze(-1)
        result = values.exp_()
        result *= (hard + soft * self.shares.sum()).unsqueeze(-1) if self.smoothing else hard.unsqueeze(-1)
        if values.shape[-1]:
            result.scatter_add_(-1, self.position[rows].unsqueeze(-1), (-hard * self.is_own[rows]).unsqueeze(-1))
        if self.smoothing:
            result -= soft.unsqueeze(-1) * (1.0 if self.own_weight is None else self.own_weight)
        return result


_ALL = slice(None)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: _Targets, axis: Axis) -> Tensor:
        losses, log_total = targets.losses(gather_ranks(targets.sums(_own_float(logits), _ALL), axis))
        # Of the vocabulary-sized tensors only the logits are kept; the softmax is recomputed in backward.
        ctx.save_for_backward(logits, log_total)
        ctx.targets = targets
        return losses

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_total = ctx.saved_tensors
        return ctx.targets.gradient(_own_float(logits), log_total, incoming, _ALL).to(logits.dtype), None, None


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: _Targets, axis: Axis, steps: Steps
    ) -> Tensor:
        chunks = row_chunks(hidden.shape[0], weight.shape[0] * (1 + len(steps)))  # each step keeps something
        sums = [
            targets.sums(_own_float(_stepped(steps, F.linear(hidden[rows], weight, bias))), rows) for rows in chunks
        ]
        losses, log_total = targets.losses(gather_ranks(torch.cat(sums, -1), axis))
        ctx.save_for_backward(hidden, weight, bias, log_total)
        ctx.targets, ctx.steps = targets, steps
        return losses

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_total = ctx.saved_tensors
        by_hidden, by_weight, by_bias = (
            torch.empty_like(each) if needed else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        width = 1 + len(ctx.steps)
        if by_weight is None and by_bias is None:
            assert by_hidden is not None
            for rows in row_chunks(hidden.shape[0], weight.shape[0] * width):
                logits = F.linear(hidden[rows], weight, bias)
                gradient = _through(ctx.steps, logits, ctx.targets, log_total, incoming, rows)
                torch.mm(gradient, weight, out=by_hidden[rows])
                del logits, gradient  # before the next ones are made
            return by_hidden, None, None, None, None, None
        # Some classes at a time: what adds up over chunks, in float32, is then as large as the features.
        total = torch.zeros_like(hidden, dtype=torch.float32) if by_hidden is not None else None
        for classes in row_chunks(weight.shape[0], hidden.shape[0] * width):
            logits = F.linear(hidden, weight[classes], None if bias is None else bias[classes])
            gradient = _through(ctx.steps, logits, ctx.targets.among(classes), log_total, incoming, _ALL)
            if by_weight is not None:
                torch.mm(gradient.t(), hidden, out=by_weight[classes])
            if by_bias is not None:
                by_bias[classes] = gradient.sum(0, dtype=torch.float32)
            if total is not None:
                add_product_(total, gradient, weight[classes])
            del logits, gradient  # before the next ones are made
        by_hidden = None if total is None else total.to(hidden.dtype)
        return by_hidden, by_weight, by_bias, None, None, None


def _through(
    steps: Steps, logits: Tensor, targets: _Targets, log_total: Tensor, incoming: Tensor, rows: slice
) -> Tensor:
    """Returns the gradient of the head's output for some rows, through `steps`."""
    if not steps:
        return targets.gradient(logits.float(), log_total, incoming, rows).to(logits.dtype)
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        stepped = _stepped(steps, logits)
    by_stepped = targets.gradient(_own_float(stepped.detach()), log_total, incoming, rows)
    (gradient,) = torch.autograd.grad(stepped, logits, by_stepped.to(stepped.dtype))
    return gradient


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left @ right` to `total` in float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def row_chunks(num_rows: int, width: int) -> list[slice]:
    """Returns slices of equal length that cover all rows (or classes), of at most `CHUNK_ELEMENTS` elements each."""
    count = max(1, -(-num_rows // max(1, CHUNK_ELEMENTS // max(1, width))))
    size = max(1, -(-num_rows // count))
    return [slice(start, min(start + size, num_rows)) for start in range(0, max(1, num_rows), size)]


def _stepped(steps: Steps, logits: Tensor) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits


def _own_float(values: Tensor) -> Tensor:
    """Returns a writable copy in float32."""
    return values.to(torch.float32, copy=True)


def gather_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Returns every rank's `x`, `[ranks, *x.shape]`."""
    if axis.group is None:
        return x.unsqueeze(0)
    parts = x.new_empty(axis.size, *x.shape)
    all_gather_single(parts.flatten(0, 1), x, axis.group)
    return parts


def _check_targets(target: Tensor, kept: Tensor, num_classes: int) -> None:
    # A target of no rank would come back as a silent loss; where checking would stall a GPU, the device checks.
    valid = (~kept | ((target >= 0) & (target < num_classes))).all()

    def say() -> str:
        bad = target[kept & ((target < 0) | (target >= num_classes))]
        return f"Target {int(bad[0])} is out of bounds: there are {num_classes} classes"

    check_index(valid, "a target is outside the classes", say)
