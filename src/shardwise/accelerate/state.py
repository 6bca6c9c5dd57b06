"""`save_state` and `load_state` of accelerate, as one of our checkpoints, which any layout loads."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from typing_extensions import override

from shardwise.api.checkpoints import load_checkpoint, save_request, save_with
from shardwise.checkpoint.writer import SaveRequest
from shardwise.errors import ConfigError, LoadError, UnsupportedError
from shardwise.parameters.registry import is_split

_KEY = "accelerate"


class SavesState(Accelerator):
    """The part of `SplitAccelerator` that saves and resumes."""

    @override
    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> str:
        """Saves the model, optimizers, schedulers, random states and registered objects as one checkpoint.

        Registered objects must have the same state on every rank.

        Args:
            output_dir: the checkpoint's directory. With `automatic_checkpoint_naming` it is the project's next one.

        Returns:
            The checkpoint's directory.

        Communicates: as `shardwise.save_checkpoint`.
        """
        is_plain = safe_serialization and not save_model_func_kwargs
        if self._save_model_state_pre_hook or not is_plain or self.use_stateful_dataloader:
            raise UnsupportedError(
                "save_state of a split model with hooks, stateful loaders or options of accelerate's formats",
                why="the checkpoint is Shardwise's, which holds the parts of every rank",
                fix="leave them out, and write files of your own beside it",
            )
        project = self.project_configuration
        is_named = project.automatic_checkpoint_naming
        place = self._place(f"checkpoint_{project.iteration}" if is_named else output_dir, is_named=is_named)

        def request() -> SaveRequest:
            if is_named and place.exists():
                raise ConfigError(f"{place} exists", fix="set project_configuration.iteration to the next number")
            return save_request(place.parent, place.name, None, project.total_limit if is_named else None)

        state = {
            "step": self.step,
            "scheduler_steps": self._scheduler_steps(),
            "custom": [each.state_dict() for each in self._custom_objects],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }
        save_with(request, **self._parts(), extra={_KEY: state})
        project.iteration += 1
        return str(place)

    @override
    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Loads what `save_state` saved, over any layout.

        Args:
            input_dir: the checkpoint's directory. Default: the newest of the project's.

        Raises:
            LoadError: it is none of `save_state`, or does not fit; nothing is changed.
            UnsupportedError: a schedule that counts data ranks would go on over another number of them.

        Communicates: as `shardwise.load_checkpoint`.
        """
        place = self._place("newest" if input_dir is None else input_dir, is_named=input_dir is None)
        root, tag = place.parent, None if input_dir is None else place.name
        state = (load_checkpoint(root, tag) or {}).get(_KEY, {"custom": ()})
        if len(state["custom"]) != (number := len(self._custom_objects)) or "step" not in state:
            raise LoadError(
                f"{place} does not hold what save_state of this script saves",
                why=f"{number} objects are registered, and it holds {len(state['custom'])}",
                fix="register the same ones, in the same order; or use shardwise.load_checkpoint",
            )
        if (saved := state["scheduler_steps"]) != (steps := self._scheduler_steps()) and saved and steps:
            raise UnsupportedError(
                f"going on with a scheduler that stepped {saved} times for each step of the optimizer, and now {steps}",
                why="accelerate steps it once for each data rank, and its schedule is written for their number",
                fix="use split_batches=True in both runs: schedules then count steps",
            )
        load_checkpoint(root, tag, **self._parts())
        for each, value in zip(self._custom_objects, state["custom"], strict=True):
            each.load_state_dict(value)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]

    def _place(self, directory: Any, *, is_named: bool) -> Path:
        """Returns the path of a checkpoint. `is_named`: one of the project's, by its name."""
        if directory is None or (is_named and self.project_dir is None):
            raise ConfigError("no directory for a checkpoint", fix="pass one, or project_dir= to the Accelerator")
        return Path(self.project_dir, "checkpoints", directory).absolute() if is_named else Path(directory).absolute()

    def _scheduler_steps(self) -> int:
        """Returns how often schedulers step after an optimizer's step; 0 if the caller alone steps them."""
        return max((each.steps for each in self._schedulers if each.step_with_optimizer), default=0)

    def _parts(self) -> dict[str, Any]:
        """Returns the model, optimizers and schedulers of a checkpoint."""
        split = [each for each in self._models if is_split(each)]
        trained = [each for each in split if any(value.requires_grad for value in each.parameters())]
        if len(models := trained or split) != 1:
            raise UnsupportedError(
                f"the state of {len(models)} split models",
                why="a checkpoint holds one",
                fix="shardwise.save_checkpoint of each",
            )
        optimizers = [each.optimizer for each in self._optimizers]
        schedulers = [each.scheduler for each in self._schedulers]
        return {
            "model": models[0],
            "optimizer": (optimizers if optimizers[1:] else optimizers[0]) if optimizers else None,
            "scheduler": (schedulers if schedulers[1:] else schedulers[0]) if schedulers else None,
        }
