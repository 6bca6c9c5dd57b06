"""Models in a LightningModule: finds them, splits them, and gives them one loss for all ranks.

# [Note: one loss for all]
A rank's own loss is the mean over its own rows. With unequal numbers of targets, its average over ranks differs from
the unsplit model's loss, and ranks that log, monitor or stop by their own loss disagree. So hooks on the split model
replace the loss in its output. The value is the mean over all targets of all data ranks' rows, the same on every rank.
The gradient is this rank's share of that mean. A LightningModule may log it, return it or add a term to it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import RichProgressBar, StochasticWeightAveraging, TQDMProgressBar, WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.api.building import parallelize
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.collectives import Group, all_reduce_, broadcast_
from shardwise.data.batch import check_divides, make_up_targets, target_names, targets_of
from shardwise.errors import ConfigError, LayoutError, UnsupportedError
from shardwise.loss.label_use import check_model_divides
from shardwise.mesh import Mesh
from shardwise.optim.gradients import Gradients, gradients_of
from shardwise.parameters.registry import Registry, entry_of, is_split, registry_of, reshard
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapter_facts import find_model, has_adapters
from shardwise.runtime.linear import apply_mixin
from shardwise.topology.shape import DATA_AXES, MeshShape

_HOOKS = "_shardwise_loss_hooks"


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
        batch = dict(zip(self._names, args, strict=False)) | kwargs
        count = targets_of(model, batch)
        if count is None:
            return None
        self._count = torch.as_tensor(count, dtype=torch.float32, device=self._gradients.registry.mesh.device)
        has_several = len(target_names(model)) > 1  # of which one rank may have too many, and no other
        with raise_on_all_ranks(self._group, "counting its targets") if has_several else nullcontext():
            check_divides(model, batch, [batch], self._gradients.registry.mesh.data_size)
        changed: dict[str, Tensor] = {}
        if isinstance(count, Tensor):
            # Other ranks wait for this one's gradients. The mean over no targets is 0/0, so some are made up: they
            # count nothing.
            made_up = make_up_targets(batch)
            changed = {name: torch.where(count > 0, batch[name], own) for name, own in made_up.items()}
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


_SPEC = "_shardwise_lightning_spec"


def note_spec(model: nn.Module, spec: ParallelSpec) -> None:
    """Records the strategy's options with which a model was split."""
    root = registry_of(model).model()
    assert root is not None
    root.__dict__[_SPEC] = spec


def check_callbacks(callbacks: Sequence[Any], shape: MeshShape) -> None:
    """Raises `UnsupportedError` for Lightning callbacks that average weights in a copy of the unsplit module."""
    found = [type(each).__name__ for each in callbacks if isinstance(each, StochasticWeightAveraging | WeightAveraging)]
    if found and shape.world_size > 1:
        raise UnsupportedError(
            f"the callback {found[0]} over {shape}",
            why="it copies the module before it is split, and averages this rank's parts into full tensors",
            fix="average them in a callback of your own, which clones self.model's parameters in on_fit_start",
        )


class SplitModels:
    """The split models in a LightningModule during a run.

    Transformers models that are not split yet are split here. Everything else in the module, such as a value head, is
    moved to the device and set to rank 0's values, as in Lightning's own strategies.

    Args:
        trains: whether trained models should be in training mode; `load` leaves them in eval mode.

    Attributes:
        gradients: state of the first model's gradients, and of all parameters outside of models.

    Communicates: like `parallelize` for models that are not split; a broadcast of every parameter and buffer outside.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, spec: ParallelSpec, *, trains: bool) -> None:
        for model in list(_outermost(module)):
            if not is_split(model):
                parallelize(model, mesh, **vars(spec))
                note_spec(model, spec)
        self._roots = [root for model in _outermost(module) if (root := registry_of(model).model()) is not None]
        if not self._roots:
            raise ConfigError(
                f"{type(module).__name__} holds no transformers model",
                why="ShardwiseStrategy trains models that Shardwise splits",
                fix="in configure_model: self.model = shardwise.load(..., self.trainer.strategy.mesh)",
            )
        for root in self._roots:
            _check_root(root, mesh, spec)
            reshard(root)  # what an evaluation has left gathered would go to the optimizer
        if trains:
            _check_one_trained(module, self._roots)
        for model in _outermost(module) if trains else ():
            if any(value.requires_grad for value in model.parameters()) and not _is_training(model):
                model.train()
        self._move_others(module, mesh)
        self.gradients: Gradients = gradients_of(module)
        self.gradients.adopt_added()  # says now which of them cannot be trained
        self._hooks = [LossHooks(root, registry_of(root), gradients_of(root)) for root in self._roots]

    def _move_others(self, module: nn.Module, mesh: Mesh) -> None:
        inside = {id(each) for root in self._roots for each in root.modules()}
        others: list[Tensor] = []
        for each in module.modules():
            if id(each) not in inside:
                for value in (*each._parameters.values(), *each._buffers.values()):
                    if value is not None:
                        value.data = value.data.to(mesh.device)
                        others.append(value.data)
        if (group := mesh.group()) is not None:
            for other in others:
                broadcast_(other, group, source=0)

    def take_targets(self) -> Tensor | None:
        """Returns the number of targets, over all data ranks, of the forwards with a loss since the last call; None
        without any.
        """
        counts = [count for hooks in self._hooks if (count := hooks.take()) is not None]
        return torch.stack(counts).sum() if counts else None

    def release(self) -> None:
        """Removes the hooks."""
        for hooks in self._hooks:
            hooks.remove()


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yields transformers models that are inside of no other one, including PEFT's wrappers."""
    for child in module.children():
        if isinstance(child, PreTrainedModel) or hasattr(child, "peft_config"):
            yield child
        else:
            yield from _outermost(child)


def _is_training(model: nn.Module) -> bool:
    """Whether any module is in training mode. Adapters are added in training mode, even to models in eval mode."""
    if has_adapters(model):
        return find_model(model).training
    return any(each.training for each in model.modules())


def _check_one_trained(module: nn.Module, roots: Sequence[nn.Module]) -> None:
    """Raises `UnsupportedError` if a model other than the first is trained: names are the first model's."""
    trained = [root for root in roots if any(entry_of(value) and value.requires_grad for value in root.parameters())]
    names = {id(each): name for name, each in module.named_modules()}
    if trained[1:] or (trained and trained[0] is not roots[0]):
        raise UnsupportedError(
            f"{type(module).__name__} trains {', '.join(names[id(root)] for root in trained)} of the split models "
            + ", ".join(names[id(root)] for root in roots),
            why="losses are weighted, gradients clipped and checkpoints named for the first one alone",
            fix="assign the trained model first, and freeze the others (requires_grad_(False)) or train each in a "
            "LightningModule of its own",
        )


def _check_root(root: nn.Module, mesh: Mesh, spec: ParallelSpec) -> None:
    shape, known = registry_of(root).mesh.shape, root.__dict__.get(_SPEC)
    if shape != mesh.shape:
        raise LayoutError(
            f"{type(root).__name__} is split over {shape}, and the strategy's layout is {mesh.shape}",
            fix="split it over self.trainer.strategy.mesh, or export it and load it again",
        )
    if spec != (known or ParallelSpec()):
        raise ConfigError(
            f"{type(root).__name__} was split with other options than the strategy's",
            why=f"the strategy's are {spec}\nthe model's are {known or 'those of shardwise.load'}",
            fix="load it with self.trainer.strategy.load(...), which uses them, or give them to shardwise.load alone",
        )


class _WithLoss:
    """Shows the last step's loss over all data ranks, unless the module logs one itself."""

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Returns what Lightning shows beside its progress bar, with the loss of all ranks."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)  # type: ignore[misc]  # of the bar beside this
        loss = getattr(trainer.strategy, "last_loss", None)
        if loss is not None and trainer.training and "loss" not in metrics:
            metrics["loss"] = float(loss)
        return metrics


class ShardwiseTQDMProgressBar(_WithLoss, TQDMProgressBar):
    """Lightning's `TQDMProgressBar`, shown by rank 0, with the loss of all ranks."""


class ShardwiseRichProgressBar(_WithLoss, RichProgressBar):
    """Lightning's `RichProgressBar`, shown by rank 0, with the loss of all ranks."""


class ShardwiseTensorBoardLogger(TensorBoardLogger):
    """Lightning's `TensorBoardLogger`, written only by rank 0.

    A model's loss that a module logs is the loss of all ranks, in every layout; see docs/lightning.md.
    """
