"""Checkpoints of an adapted Trainer: a transformers checkpoint, with ours in the same directory.

`checkpoint-N` holds the weights that `from_pretrained` loads, the Trainer's state, and what any layout can resume from:
parameters, optimizer, scheduler and random states by name. It appears complete or not at all.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from shardwise.api.checkpoints import export_pretrained, load_checkpoint, read_pretrained, save_request, save_with
from shardwise.checkpoint.collect import restore_random
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.store import unmark
from shardwise.checkpoint.stored import open_checkpoint
from shardwise.checkpoint.trainer_files import is_trainer
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.collectives import all_gather_objects
from shardwise.lora.files import load_adapter_weights
from shardwise.mesh import Mesh
from shardwise.trainer.overrides import on_split_models

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the class beside a mixin has the methods that it overrides

_STATE, _ARGUMENTS = "trainer_state.json", "training_args.bin"


class SavesSplitModels(_Trainer):
    """The part of `SplitTrainer` that saves and resumes."""

    _mesh: Mesh

    @on_split_models
    def train(self, *args: Any, **options: Any) -> Any:
        """Trains. With `enable_jit_checkpoint`, all ranks save at one step after any was sent SIGTERM."""
        for each in self.callback_handler.callbacks:
            if isinstance(each, JITCheckpointCallback):
                each.__class__ = _SavesTogether
        return super().train(*args, **options)

    @on_split_models
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes the model as `from_pretrained` loads it, with its tokenizer and the arguments.

        Communicates: as `export_pretrained`.
        """
        place = str(output_dir or self.args.output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        export_pretrained(self.model, place, tokenizer=tokenizer)
        with raise_on_all_ranks(self._mesh.group(), "saving the arguments"):
            if self.args.should_save:
                torch.save(self.args, Path(place) / _ARGUMENTS)

    @on_split_models
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves `checkpoint-N`, and deletes older ones by `save_total_limit`.

        Communicates: as `save_checkpoint` and `export_pretrained`.
        """
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        root = Path(self._get_output_dir(trial=trial))
        if self.state.best_global_step:
            best = root / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best.name == name or best.exists():
                self.state.best_model_checkpoint = str(best)
        self._note_callbacks()
        if self.args.save_only_model:
            self._add_files(root / name)
        else:
            save_with(
                functools.partial(save_request, root, name, None, step=self.state.global_step),
                model=self.model,
                optimizer=_plain(self.optimizer),
                scheduler=self.lr_scheduler,
                extra={"step": self.state.global_step},
                add_files=self._add_files,
            )
        with raise_on_all_ranks(self._mesh.group(), "pushing the checkpoint, and deleting older ones"):
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(root / name))
            if self.args.should_save:
                rotate_checkpoints(
                    output_dir=str(root),
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=self.state.best_model_checkpoint,
                    use_mtime=True,
                )

    @on_split_models
    def push_to_hub(self, *args: Any, **options: Any) -> Any:
        """Pushes the model, without what marks the directory as one of checkpoints."""
        unmark(Path(self.args.output_dir))
        return super().push_to_hub(*args, **options)

    def _add_files(self, directory: Path) -> None:
        self._save(str(directory))
        with raise_on_all_ranks(self._mesh.group(), "saving the Trainer's state"):
            if self.args.should_save:
                self.state.save_to_json(str(directory / _STATE))
                self._save_scaler(str(directory))

    def _note_callbacks(self) -> None:
        """Writes the states of callbacks into the Trainer's state, as transformers does."""
        known = self.state.stateful_callbacks
        for each in [*self.callback_handler.callbacks, self.control]:
            if isinstance(each, ExportableState):
                states = known.get(kind := type(each).__name__)
                known[kind] = [*states, each.state()] if isinstance(states, list) else each.state()

    @on_split_models
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint, of any layout or of transformers' own Trainer."""
        place = Path(resume_from_checkpoint).resolve()
        if is_trainer(place) and (place / "adapter_config.json").exists():
            with raise_on_all_ranks(self._mesh.group(), "reading the adapter"):
                load_adapter_weights(self.model, place)
        elif is_trainer(place):  # of transformers' own, or the model alone
            read_pretrained(self.model, place)
        else:
            load_checkpoint(place.parent, place.name, model=self.model)

    @on_split_models
    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint."""
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    @on_split_models
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads optimizer and scheduler of a checkpoint, of any layout or of transformers' own Trainer."""
        if checkpoint is not None:
            place = Path(checkpoint).resolve()
            if is_trainer(place) and not (place / "scheduler.pt").exists():
                return  # the model alone was saved
            where = (place, None) if is_trainer(place) else (place.parent, place.name)
            load_checkpoint(*where, optimizer=_plain(self.optimizer), scheduler=self.lr_scheduler)

    @on_split_models
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Continues the random states of this data rank."""
        if checkpoint is not None and Path(checkpoint, MANIFEST).exists():
            with open_checkpoint(Path(checkpoint).resolve()) as stored:
                restore_random(self._mesh, stored.index.values.get("random", {}), stored.read_all("random/"))


class _SavesTogether(JITCheckpointCallback):
    """Saves and stops after a step, on all ranks, once any of them was sent SIGTERM."""

    has_stopped = False
    on_pre_optimizer_step = on_step_begin = TrainerCallback.on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        manager, group = self.jit_manager, self.trainer._mesh.group()
        if manager is not None and any(all_gather_objects(manager.is_checkpoint_requested, group)):
            manager.is_checkpoint_requested = False
            control.should_save = control.should_training_stop = True  # when the step is logged
            control.should_evaluate, self.has_stopped = False, True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.has_stopped:  # in the midst of the epoch: all is saved
            self.has_stopped = control.should_save = control.should_evaluate = False


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer inside of accelerate's wrapper."""
    while hasattr(optimizer, "accelerator_state"):
        optimizer = optimizer.optimizer
    return optimizer
