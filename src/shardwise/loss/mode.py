"""Cross-entropy of split logits inside the model's forward.

85 heads of transformers call `F.cross_entropy` directly instead of `loss_function`. So a torch function mode, active
from the head to the end of the forward, intercepts that call and computes it from the local parts.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.loss.cross_entropy import LossOptions, split_cross_entropy
from shardwise.loss.deferred_logits import DeferredLogits, go_on, make
from shardwise.loss.logits import SplitLogits, as_logits
from shardwise.runtime.context import SplitContext

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
    """`F.cross_entropy`, with its signature, of split logits."""
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
