"""Log-probabilities of targets, entropies and accuracies from a head that is split over the vocabulary.

The logits are made some rows (in backward some classes) at a time, as for the loss in [Note: the loss without logits].
Backward makes them again. No rank holds the logits of all rows, or more than its part of the head.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.loss.cross_entropy import add_product_, gather_ranks, row_chunks
from shardwise.runtime.context import Axis

_NUM_LIVE = 3  # tensors as large as a chunk of logits that live at a time


@dataclass(frozen=True, kw_only=True)
class HeadFormula:
    """Function from a head's product to its logits: `softcap * tanh(product * scale / softcap) / temperature`.

    Attributes:
        softcap: None leaves out the capping.
        in_float32: whether the product is computed in float32, outside of autocast.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    in_float32: bool = False

    def dtype_of(self, hidden: Tensor) -> torch.dtype:
        """Returns the dtype of the product."""
        kind = hidden.device.type
        if self.in_float32:
            return torch.float32
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

    def logits(self, product: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the logits in float32, and their derivative with respect to the product; None if it is 1.

        Overwrites `product`.
        """
        logits, derivative = product.float(), None
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_()
            derivative = 1 - logits * logits
            logits *= self.softcap
        if self.temperature != 1.0:
            logits /= self.temperature
        if (factor := self.scale / self.temperature) != 1.0:
            derivative = logits.new_tensor(factor) if derivative is None else derivative.mul_(factor)
        return logits, derivative


class Scores(NamedTuple):
    """What a head says of each row's target, `[rows]` in float32, the same on every tp rank.

    `log_probs` and `entropy` have gradients. `is_top1` is bool. What was not asked for is None.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Request for the scores of some rows.

    Attributes:
        target: int `[rows]`, the same on every tp rank.
        fields: fields of `Scores` that are asked for; `log_probs` always is.
    """

    target: Tensor
    formula: HeadFormula
    fields: tuple[str, ...] = ()

    def score(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, axis: Axis, num_classes: int) -> Scores:
        """Returns the scores of the logits that a head makes of `hidden`.

        Args:
            hidden: `[rows, features]`, the same on every rank of `axis`.
            weight: `[classes, features]`, per rank `[classes of this rank, features]` in the order of `torch.chunk`.
            bias: `[classes]`, split alike.

        Communicates: over `axis`, one all-gather of three to seven values per row and rank in forward. The gradient of
        `hidden` is partial.
        """
        start = sum(axis.even_sizes(num_classes)[: axis.coord])
        return Scores(*_Score.apply(hidden, weight, bias, self, axis, start, num_classes))

    def statistics(self, logits: Tensor, start: int, rows: slice) -> Tensor:
        """Returns this rank's statistics of some rows, `[statistics, rows]`, in the order that `combined` reads.

        Args:
            logits: float32 `[rows, classes of this rank]`; overwritten.
            start: this rank's first class.
        """
        lowest, width = torch.finfo(logits.dtype).min, logits.shape[-1]
        if not width:
            return logits.new_tensor([lowest, *[0.0] * (2 + len(self.optional))]).unsqueeze(-1).expand(-1, len(logits))
        position = self.target[rows] - start
        is_own = (position >= 0) & (position < width)
        picked = logits.gather(-1, position.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
        optional = {}
        if "is_top1" in self.optional:
            largest, index = logits.max(-1)  # the first of equal ones, as for argmax
            optional["is_top1"] = (index + start).float()
        else:
            largest = logits.amax(-1)
        if "mean_logits" in self.optional:
            optional["mean_logits"] = logits.sum(-1)
        largest = largest.clamp_(min=lowest)
        logits -= largest.unsqueeze(-1)
        powers = logits.exp() if "entropy" in self.optional else logits.exp_()
        total = powers.sum(-1)
        if "entropy" in self.optional:
            optional["entropy"] = logits.mul_(powers).sum(-1)
        if "log_sum_sq_probs" in self.optional:
            optional["log_sum_sq_probs"] = powers.square_().sum(-1)
        return torch.stack(
            [largest, total, torch.where(is_own, picked, 0.0), *(optional[name] for name in self.optional)]
        )

    @property
    def optional(self) -> tuple[str, ...]:
        """The fields that are asked for, without `log_probs`."""
        return tuple(name for name in Scores._fields[1:] if name in self.fields)

    def combined(self, parts: Tensor, num_classes: int) -> tuple[Scores, Tensor]:
        """Returns the scores, and log-sum-exps, from all ranks' statistics `[ranks, statistics, rows]`."""
        # What a rank sums is relative to its own largest logit; `below` is how far that is below the largest of all.
        maxima, sums, target, *others = parts.unbind(1)
        largest, owner = maxima.max(0)
        below = maxima - largest
        share = below.exp()
        total = (sums * share).sum(0)
        log_total = total.log()
        log_sum_exp = largest + log_total
        fields = dict(zip(self.optional, others, strict=True))
        if (weighted := fields.get("entropy")) is not None:
            fields["entropy"] = log_total - ((weighted + below * sums) * share).sum(0) / total
        if (squares := fields.get("log_sum_sq_probs")) is not None:
            fields["log_sum_sq_probs"] = (squares * share * share).sum(0).log() - 2 * log_total
        if (logits := fields.get("mean_logits")) is not None:
            fields["mean_logits"] = logits.sum(0) / num_classes
        if (index := fields.get("is_top1")) is not None:
            fields["is_top1"] = index.gather(0, owner.unsqueeze(0)).squeeze(0) == self.target
        return Scores(target.sum(0) - log_sum_exp, **fields), log_sum_exp


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scoring: Scoring,
        axis: Axis,
        start: int,
        num_classes: int,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs no backward
        ctx.dtype = scoring.formula.dtype_of(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            own, own_bias = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            found = []
            for rows in row_chunks(hidden.shape[0], weight.shape[0] * _NUM_LIVE):
                logits, _ = scoring.formula.logits(F.linear(hidden[rows].to(ctx.dtype), own, own_bias))
                found.append(scoring.statistics(logits, start, rows))
                del logits  # before the next ones are made
        scores, log_sum_exp = scoring.combined(gather_ranks(torch.cat(found, -1), axis), num_classes)
        ctx.save_for_backward(hidden, weight, bias, scoring.target - start, log_sum_exp, scores.entropy)
        ctx.formula = scoring.formula
        ctx.mark_non_differentiable(*(each for each in scores[2:] if each is not None))
        return tuple(scores)

    @staticmethod
    def backward(ctx: Any, by_log_probs: Tensor | None, by_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        hidden, weight, bias, position, log_sum_exp, entropy = ctx.saved_tensors
        rows = hidden.to(ctx.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Some classes at a time: what adds up over chunks, in float32, is then as large as the features.
        total = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        by_weight = torch.empty_like(weight) if needs_weight else None
        by_bias = torch.empty_like(bias) if needs_bias else None
        for classes in row_chunks(weight.shape[0], hidden.shape[0] * _NUM_LIVE):
            own = weight[classes].to(ctx.dtype)
            product = F.linear(rows, own, None if bias is None else bias[classes].to(ctx.dtype))
            logits, derivative = ctx.formula.logits(product)
            gradient = _gradient(logits.sub_(log_sum_exp.unsqueeze(-1)), entropy, by_log_probs, by_entropy)
            index = position - classes.start
            is_own = (index >= 0) & (index < gradient.shape[-1])
            if by_log_probs is not None and gradient.shape[-1]:
                index = index.clamp(0, gradient.shape[-1] - 1).unsqueeze(-1)
                gradient.scatter_add_(-1, index, (by_log_probs * is_own).unsqueeze(-1))
            gradient = (gradient if derivative is None else gradient.mul_(derivative)).to(ctx.dtype)
            if by_weight is not None and by_weight.dtype == ctx.dtype:
                torch.mm(gradient.t(), rows, out=by_weight[classes])
            elif by_weight is not None:
                by_weight[classes] = gradient.t() @ rows
            if by_bias is not None:
                by_bias[classes] = gradient.sum(0, dtype=torch.float32).to(by_bias.dtype)
            if total is not None:
                add_product_(total, gradient, own)
            del product, logits, derivative, gradient  # before the next ones are made
        return None if total is None else total.to(hidden.dtype), by_weight, by_bias, None, None, None, None


def _gradient(log_p: Tensor, entropy: Tensor | None, by_log_probs: Tensor | None, by_entropy: Tensor | None) -> Tensor:
    """Returns the gradient of logits whose log-probabilities are `log_p`, without what their targets add.

    Overwrites `log_p`.
    """
    if by_entropy is None or entropy is None:
        assert by_log_probs is not None
        return log_p.exp_().mul_(-by_log_probs.unsqueeze(-1))
    p = log_p.exp()
    factor = log_p.add_(entropy.unsqueeze(-1)).mul_(by_entropy.unsqueeze(-1))
    if by_log_probs is not None:
        factor += by_log_probs.unsqueeze(-1)
    return p.mul_(factor).neg_()
