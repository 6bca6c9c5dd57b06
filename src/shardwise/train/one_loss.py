"""One loss for all ranks: what a split model returns in loops that are written for one process.

# [Note: one loss for all]
A rank's own loss is the mean over its own rows. With unequal numbers of targets, its average over ranks differs from
the unsplit model's loss, and ranks that log, monitor or stop by their own loss disagree. So hooks on the split model
replace the loss in its output. The value is the mean over all targets of all data ranks' rows, the same on every rank.
The gradient is this rank's share of that mean. A caller may log it, or add a term to it.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.collectives import Group, all_reduce_
from shardwise.data.batch import check_divides, counts_rows, drop_targets, make_up_targets, target_names, targets_of
from shardwise.errors import UnsupportedError
from shardwise.loss.label_use import check_model_divides
from shardwise.mesh import Mesh
from shardwise.optim.gradients import Gradients, gradients_of
from shardwise.parameters.registry import Registry, registry_of
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.linear import apply_mixin
from shardwise.topology.shape import DATA_AXES

_HOOKS = "_shardwise_loss_hooks"
_ROWS = "_shardwise_rows"


def mark_rows(batch: Any, counts: Sequence[int], rank: int) -> Any:
    """Returns a batch with views of its tensors, which know how many of their rows are copies.

    Copies are the last rows, and count nothing in one loss for all where a marked tensor is given to the model.

    Args:
        counts: the number of rows of each data rank, without copies.
        rank: this data rank.
    """
    if not isinstance(batch, Mapping):
        return batch
    marked: Any = copy.copy(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor):
            marked[name] = value.view_as(value)
            setattr(marked[name], _ROWS, (tuple(counts), rank))
    return marked


def check_parts(model: nn.Module, batch: Mapping[str, Any], mesh: Mesh) -> None:
    """Raises `UnsupportedError` on every rank if the losses of data ranks' rows cannot be put together.

    Communicates: where the model has several kinds of targets, an agreement of the data ranks.
    """
    has_several = len(target_names(model)) > 1  # of which one rank may have too many, and no other
    with raise_on_all_ranks(mesh.group(*DATA_AXES), "counting its targets") if has_several else nullcontext():
        check_divides(model, batch, [batch], mesh.data_size)


def share_loss(model: nn.Module) -> None:
    """Gives a split model one loss for all ranks, once; see [Note: one loss for all]."""
    registry = registry_of(model)
    root = registry.model() or model
    if registry.mesh.data_size > 1 and _HOOKS not in root.__dict__:
        LossHooks(root, registry, gradients_of(root))


class LossHooks:
    """Hooks on one split model.

    Args:
        gradients: state of its gradients. In a `TrainStep`, which weights its microbatches, hooks do nothing.

    Attributes:
        num_targets: number of targets over all data ranks, of the forwards with loss and graph since the last `take`;
            None without any.
    """

    def __init__(self, model: nn.Module, registry: Registry, gradients: Gradients) -> None:
        self._gradients = gradients
        self._group = registry.mesh.group(*DATA_AXES)
        self._factor = registry.divide_factor if registry.mesh.data_size > 1 else 1.0
        self._names = tuple(inspect.signature(find_model(model).forward).parameters)
        self._count: Tensor | None = None
        self.num_targets: Tensor | None = None
        self._model, self._handles = model, []
        check_model_divides(model, registry.mesh.data_size)
        if registry.stages is None:
            self._handles = [
                model.register_forward_pre_hook(self._count_targets, with_kwargs=True),
                model.register_forward_hook(self._replace_loss, with_kwargs=True),
            ]
        elif not isinstance(model, _InStages):
            apply_mixin(model, _InStages)
        model.__dict__[_HOOKS] = self

    def remove(self) -> None:
        """Removes the hooks."""
        self._model.__dict__.pop(_HOOKS, None)
        for handle in self._handles:
            handle.remove()

    def run_stages(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs forward and backward through all stages at once; the loss is weighted by this rank's share."""
        args, kwargs = self._count_targets(self._model, args, kwargs) or (args, kwargs)
        if self._count is None:
            return call(*args, **kwargs)
        total = self._count.clone()
        if self._group is not None:
            all_reduce_(total, self._group)
        self._gradients.share = float(self._count / total.clamp(min=1.0)) * self._factor
        try:
            output = call(*args, **kwargs)
        finally:
            self._gradients.share = 1.0
        return self._replace_loss(self._model, args, kwargs, output, is_shared=True) or output

    def take(self) -> Tensor | None:
        """Returns the targets counted since the last call, and resets the count."""
        counted, self.num_targets = self.num_targets, None
        return counted

    def _count_targets(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        self._count = None
        if self._gradients.is_in_step:
            return None
        given = dict(zip(self._names, args, strict=False)) | kwargs
        batch, is_copied = _without_copies(model, given)
        if batch.get("num_items_in_batch") is not None:
            # A sum that the caller divides by a number of targets, all ranks' perhaps, is the caller's to put together.
            return None if batch is given else ((), batch)
        count = targets_of(model, batch)
        if count is None:
            return None
        count = torch.zeros(()) if is_copied else count
        self._count = torch.as_tensor(count, dtype=torch.float32, device=self._gradients.registry.mesh.device)
        check_parts(model, batch, self._gradients.registry.mesh)
        changed: dict[str, Tensor] = {}
        if isinstance(count, Tensor):
            # Other ranks wait for this one's gradients. The mean over no targets is 0/0, so some are made up: they
            # count nothing.
            made_up = make_up_targets(batch)
            changed = {
                name: torch.where(self._count.to(own.device) > 0, batch[name], own) for name, own in made_up.items()
            }
        return (args, kwargs | changed) if changed.keys() <= kwargs.keys() else ((), batch | changed)

    def _replace_loss(self, model: nn.Module, args: Any, kwargs: Any, output: Any, *, is_shared: bool = False) -> Any:
        count, self._count = self._count, None
        if count is None:
            return None
        is_tuple = isinstance(output, tuple)
        loss = output[0] if is_tuple else output.get("loss") if isinstance(output, Mapping) else None
        if not isinstance(loss, Tensor) or loss.ndim:
            return None
        mean, total = _MeanOverRanks.apply(
            loss, count.to(loss.device), self._group, None if is_shared else self._factor
        )
        if torch.is_grad_enabled():
            self.num_targets = total if self.num_targets is None else self.num_targets + total
        if is_tuple:
            return (mean, *output[1:])
        output["loss"] = mean
        return output


def _without_copies(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, bool]:
    """Returns a batch without the targets of copies that `mark_rows` has marked, and whether all rows are copies."""
    marks = [getattr(batch[name], _ROWS, None) for name in target_names(model) if batch.get(name) is not None]
    counts, rank = next((mark for mark in marks if mark is not None), ((), 0))
    if not counts:
        return batch, False
    labels = batch.get("labels")
    is_number = counts_rows(find_model(model)) or (isinstance(labels, Tensor) and labels.is_floating_point())
    if is_number and any(0 < count < max(counts) for count in counts):
        raise UnsupportedError(
            f"the loss of a last batch of {sum(counts)} rows for {len(counts)} data ranks, with numbers as labels",
            why="copies of rows fill it up, and would count",
            fix="use drop_last=True, a number of rows that divides, or no labels",
        )
    return (batch if is_number else drop_targets(batch, counts[rank])), counts[rank] == 0


class _InStages:
    """Mixin of a model in stages. Hooks on its own forward would run in every stage, once per microbatch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self
        hooks, stages = model.__dict__.get(_HOOKS), registry_of(model).stages
        call = super().__call__  # type: ignore[misc]  # of the model's class
        if hooks is None or stages is None or stages.current is not None:
            return call(*args, **kwargs)
        return hooks.run_stages(call, args, kwargs)


class _MeanOverRanks(torch.autograd.Function):
    """Mean over all ranks' targets of a loss that is a mean over each rank's own; also the number of all targets.

    The gradient is this rank's share times `factor`; the full gradient if `factor` is None.

    Forward all-reduces two numbers over the data ranks; backward communicates nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, count: Tensor, group: Group | None, factor: float | None
    ) -> tuple[Tensor, Tensor]:
        share = torch.where(count > 0, loss.detach().float() * count, 0.0)
        sums = torch.stack([share, count])
        if group is not None:
            all_reduce_(sums, group)
        total = sums[1].clone()
        ctx.weight = torch.ones_like(total) if factor is None else count / total.clamp(min=1.0) * factor
        ctx.mark_non_differentiable(total)
        return (sums[0] / total.clamp(min=1.0)).to(loss.dtype), total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        return gradient * ctx.weight.to(gradient.dtype), None, None, None
