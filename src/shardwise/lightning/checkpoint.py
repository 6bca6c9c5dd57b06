"""A Trainer's checkpoints in our format: directories that any layout loads. Lightning's state is their `extra`.

`trainer.save_checkpoint("runs/step=10.ckpt")` writes the checkpoint `step=10.ckpt` in the directory `runs`.
`shardwise.load_checkpoint("runs", "step=10.ckpt", model=model)` reads it too.
"""

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ParallelStrategy

from shardwise.api.checkpoints import load_checkpoint, save_checkpoint
from shardwise.checkpoint.collect import state_for_groups
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.comm.collectives import broadcast_object
from shardwise.errors import LoadError, UnsupportedError

_OURS = "shardwise"  # what this strategy adds to the state
_TENSORS = ("state_dict", "optimizer_states")


def _place_of(path: Any) -> Path:
    """Returns the path of a checkpoint. Lightning's tuners start names with a dot, which our tags must not have."""
    place = Path(path)
    name = place.name.lstrip(".")
    return place.with_name(name) if name else place


class SavesParts(ParallelStrategy):
    """Saving and loading, a mixin of `ShardwiseStrategy`."""

    mesh: Any

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: tensors are loaded into split models and their optimizers."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` restores optimizers."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """A placeholder: `save_checkpoint` writes each rank's parts."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """A placeholder: `save_checkpoint` writes each rank's parts."""
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:  # noqa: FBT001, FBT002
        """Does nothing: `load_checkpoint` has loaded the model."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes Lightning's state, the module's tensors and its optimizers' as a checkpoint directory.

        Communicates: a broadcast of rank 0's state, and what `shardwise.save_checkpoint` does.
        """
        if storage_options is not None or self._checkpoint_io is not None:
            raise UnsupportedError(
                "a CheckpointIO, or storage_options, with ShardwiseStrategy",
                why="ranks write what they hold into one directory themselves",
                fix="leave them out",
            )
        trains, group = "optimizer_states" in checkpoint, self.mesh.group()
        state = {name: value for name, value in checkpoint.items() if name not in _TENSORS}
        ours = {"trains": trains, "replaced": {name: state[name] for name in ("step", _OURS) if name in state}}
        extra = state | {"step": checkpoint["global_step"], _OURS: ours}
        place = _place_of(broadcast_object(str(filepath), group))
        save_checkpoint(
            place.parent,
            tag=place.name,
            model=self.lightning_module,
            optimizer=self.optimizers if trains else None,
            extra=broadcast_object(extra, group),
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Loads a checkpoint directory of any layout into the module and its optimizers; returns Lightning's state.

        No code in it is run. Errors are the same on every rank.
        """
        assert self.lightning_module is not None
        place = _place_of(broadcast_object(str(checkpoint_path), self.mesh.group()))
        if place.is_file():
            raise LoadError(
                f"{place} is a file",
                why="a checkpoint of ShardwiseStrategy is a directory; this one is of another strategy",
                fix="load its weights into the unsplit model, and save that with save_pretrained",
            )
        state = load_checkpoint(place.parent, place.name)
        if not isinstance(state, dict) or "pytorch-lightning_version" not in state:
            raise LoadError(f"{place} was not saved by a Trainer", fix="load it with shardwise.load_checkpoint")
        ours = state.pop(_OURS)
        del state["step"]
        state |= ours["replaced"]
        optimizers = self.optimizers if ours["trains"] else []
        strict = self.lightning_module.strict_loading
        load_checkpoint(place.parent, place.name, model=self.lightning_module, optimizer=optimizers, strict=strict)
        if optimizers:  # rank 0's lists are of the groups of its stage
            scheduled = [getattr(each.scheduler, "optimizer", optimizers[0]) for each in self.lr_scheduler_configs]
            pairs = zip(state.get("lr_schedulers", []), scheduled, strict=False)
            state["lr_schedulers"] = [state_for_groups(each, optimizer.param_groups) for each, optimizer in pairs]
        return {**state, "state_dict": {}}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Deletes a checkpoint directory, on one rank. A crash on the way leaves no valid checkpoint."""
        place = _place_of(filepath)
        if not self.is_global_zero:
            return
        if place.is_dir() and not place.is_symlink():
            (place / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
