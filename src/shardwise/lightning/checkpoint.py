"""A Trainer's checkpoints in our format: directories that any layout loads, with what Lightning keeps as their `extra`.

`trainer.save_checkpoint("runs/step=10.ckpt")` is the checkpoint `step=10.ckpt` of the directory `runs`, which
`shardwise.load_checkpoint("runs", "step=10.ckpt", model=model)` reads too.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from shardwise.api.checkpoints import load_checkpoint, save_checkpoint
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.comm.operations import broadcast_object
from shardwise.errors import LoadError, UnsupportedError, counted
from shardwise.mesh import Mesh

__all__ = ["HeldByRanks", "SavesParts"]

_TENSORS = ("state_dict", "optimizer_states")


class HeldByRanks(dict[str, Any]):
    """Stands where Lightning keeps a state dict: ranks hold parts, which go from them into the checkpoint."""

    def __getitem__(self, key: str) -> NoReturn:
        raise UnsupportedError(
            f"{key!r} of a state dict in a Trainer's checkpoint",
            why="ranks hold parts of tensors, and write them themselves",
            fix="use shardwise.full_state_dict(model) on every rank",
        )


def _save_trainer(
    state: Mapping[str, Any], path: Any, *, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: Mesh
) -> None:
    """Saves what Lightning has dumped into `state`, with the module's tensors and its optimizer's.

    Raises:
        ConfigError: something in it is neither JSON nor a tensor.
        UnsupportedError: there are several optimizers.

    Communicates: a broadcast of rank 0's state; as `save_checkpoint`.
    """
    trains = "optimizer_states" in state
    extra = {name: value for name, value in state.items() if name not in _TENSORS} | {"step": state["global_step"]}
    place = _place_of(broadcast_object(str(path), mesh.group()))
    save_checkpoint(
        place.parent,
        tag=place.name,
        model=module,
        optimizer=_only(optimizers) if trains else None,
        extra=broadcast_object(extra | {"trains": trains}, mesh.group()),
    )


def _load_trainer(
    path: Any, *, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], strict: bool, mesh: Mesh
) -> dict[str, Any]:
    """Loads a checkpoint into the module and, where there are any, the optimizers; returns what Lightning kept.

    Raises:
        LoadError: there is none, or it does not fit; the same on every rank.
    """
    place = _place_of(broadcast_object(str(path), mesh.group()))
    if place.is_file():
        raise LoadError(
            f"{place} is a file",
            why="a checkpoint of ShardwiseStrategy is a directory; this one is of another strategy",
            fix="load its weights into the unsplit model, and save that with save_pretrained",
        )
    extra = load_checkpoint(place.parent, place.name)
    if not isinstance(extra, dict) or "pytorch-lightning_version" not in extra:
        raise LoadError(f"{place} was not saved by a Trainer", fix="load it with shardwise.load_checkpoint")
    optimizer = _only(optimizers) if optimizers and extra.pop("trains") else None
    load_checkpoint(place.parent, place.name, model=module, optimizer=optimizer, strict=strict)
    return {**extra, "state_dict": HeldByRanks()}


def _remove_trainer(path: Any) -> None:
    """Deletes a checkpoint, on one rank. What a crash leaves of it is none."""
    place = _place_of(path)
    if place.is_dir() and not place.is_symlink():
        (place / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _place_of(path: Any) -> Path:
    """Where a checkpoint of that name is: Lightning's tuners begin names with a dot, which our tags may not."""
    place = Path(path)
    name = place.name.lstrip(".")
    return place.with_name(name) if name else place


def _only(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    if len(optimizers) != 1:
        raise UnsupportedError(
            f"a checkpoint with {counted(len(optimizers), 'optimizer')}",
            why="its states are kept by the names of parameters, for one optimizer",
            fix="use one with several parameter groups, or save weights only",
        )
    return optimizers[0]


class SavesParts(ParallelStrategy):
    """The part of `ShardwiseStrategy` that saves and loads."""

    mesh: Any

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: tensors go into split models and their optimizers."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` has done so."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """A place-holder: `save_checkpoint` writes what every rank holds."""
        return HeldByRanks()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """A place-holder, as above."""
        return HeldByRanks()

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:  # noqa: FBT001, FBT002
        """Nothing: `load_checkpoint` has done so."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint directory; see `shardwise.save_checkpoint`.

        Raises:
            UnsupportedError: options of a storage are given.
        """
        if storage_options is not None or self._checkpoint_io is not None:
            raise UnsupportedError(
                "a CheckpointIO, or storage_options, with ShardwiseStrategy",
                why="ranks write what they hold into one directory themselves",
                fix="leave them out",
            )
        assert self.lightning_module is not None
        _save_trainer(checkpoint, filepath, module=self.lightning_module, optimizers=self.optimizers, mesh=self.mesh)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Loads a checkpoint directory that any layout has written. Nothing in it is ever run."""
        assert self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        return _load_trainer(
            checkpoint_path, module=self.lightning_module, optimizers=self.optimizers, strict=strict, mesh=self.mesh
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Deletes a checkpoint directory."""
        if self.is_global_zero:
            _remove_trainer(filepath)
