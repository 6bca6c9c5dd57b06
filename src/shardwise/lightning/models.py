"""Models in a LightningModule: finds them, splits them, and gives them one loss for all ranks.

A LightningModule may log the loss of its model, return it or add a term to it; see [Note: one loss for all].
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import RichProgressBar, StochasticWeightAveraging, TQDMProgressBar, WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.api.building import parallelize
from shardwise.comm.collectives import broadcast_
from shardwise.errors import ConfigError, LayoutError, UnsupportedError
from shardwise.mesh import Mesh
from shardwise.optim.gradients import Gradients, gradients_of
from shardwise.parameters.registry import entry_of, is_split, registry_of, reshard
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapter_facts import find_model, has_adapters
from shardwise.topology.shape import MeshShape
from shardwise.train.one_loss import LossHooks

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
        """Returns the number of targets of all data ranks' losses since the last call; None without any loss."""
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
