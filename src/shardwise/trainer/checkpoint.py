"""Checkpoints of an adapted Trainer: a transformers checkpoint, with ours in the same directory.

`checkpoint-N` holds the weights that `from_pretrained` loads, the Trainer's state, and what any layout can resume from:
parameters, optimizer, scheduler and random states by name. It appears complete or not at all.
"""

import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from typing_extensions import override

from shardwise.api.checkpoints import export_pretrained, load_checkpoint, read_pretrained, save_request, save_with
from shardwise.checkpoint.collect import restore_random
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.stored import open_checkpoint
from shardwise.checkpoint.trainer_files import is_trainer
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.lora.files import load_adapter_weights
from shardwise.mesh import Mesh

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the class beside a mixin has the methods that it overrides

_STATE, _ARGUMENTS, _INCOMPLETE = "trainer_state.json", "training_args.bin", "checkpoint-is-incomplete.txt"


class SavesSplitModels(_Trainer):
    """The part of `SplitTrainer` that saves and resumes."""

    _mesh: Mesh | None

    @override
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes the model as `from_pretrained` loads it, with its tokenizer and the arguments.

        Communicates: as `export_pretrained`.
        """
        if self._mesh is None:
            super()._save(output_dir, state_dict)
            return
        place = str(output_dir or self.args.output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        export_pretrained(self.model, place, tokenizer=tokenizer)
        with raise_on_all_ranks(self._mesh.group(), "saving the arguments"):
            if self.args.should_save:
                torch.save(self.args, Path(place) / _ARGUMENTS)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves `checkpoint-N`, and deletes older ones by `save_total_limit`.

        Communicates: as `save_checkpoint` and `export_pretrained`.
        """
        if self._mesh is None:
            super()._save_checkpoint(model, trial)
            return
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        root = Path(self._get_output_dir(trial=trial))
        with raise_on_all_ranks(self._mesh.group(), "clearing the place of a checkpoint"):
            if self.args.should_save and [each.name for each in (root / name).glob("*")] == [_INCOMPLETE]:
                shutil.rmtree(root / name)  # transformers marks a directory before it saves after SIGTERM
        if self.state.best_global_step:
            best = root / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best.name == name or best.exists():
                self.state.best_model_checkpoint = str(best)
        self._note_callbacks()
        if self.args.save_only_model:
            self._save(str(root / name))
            self._write_state(root / name)
        else:
            save_with(
                functools.partial(save_request, root, name, None, step=self.state.global_step),
                model=self.model,
                optimizer=_plain(self.optimizer),
                scheduler=self.lr_scheduler,
                extra={"step": self.state.global_step},
                add_files=self._add_files,
            )
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(root / name))
        with raise_on_all_ranks(self._mesh.group(), "deleting older checkpoints"):
            if self.args.should_save:
                rotate_checkpoints(
                    output_dir=str(root),
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=self.state.best_model_checkpoint,
                    use_mtime=True,
                )

    def _add_files(self, directory: Path) -> None:
        self._save(str(directory))
        self._write_state(directory)

    def _write_state(self, directory: Path) -> None:
        assert self._mesh is not None
        with raise_on_all_ranks(self._mesh.group(), "saving the Trainer's state"):
            if self.args.should_save:
                self.state.save_to_json(str(directory / _STATE))
                self._save_scaler(str(directory))

    def _note_callbacks(self) -> None:
        """Writes the states of callbacks into the Trainer's state, as transformers does."""
        for each in [*self.callback_handler.callbacks, self.control]:
            if isinstance(each, ExportableState):
                kind, state = type(each).__name__, each.state()
                known = self.state.stateful_callbacks.get(kind)
                if isinstance(known, list):
                    known.append(state)
                else:
                    self.state.stateful_callbacks[kind] = state

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint, of any layout or of transformers' own Trainer."""
        if self._mesh is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        place = _place_of(resume_from_checkpoint)
        if is_trainer(place) and (place / "adapter_config.json").exists():
            with raise_on_all_ranks(self._mesh.group(), "reading the adapter"):
                load_adapter_weights(self.model, place)
            return
        if is_trainer(place):  # of transformers' own, or the model alone
            read_pretrained(self.model, place)
            return
        load_checkpoint(place.parent, place.name, model=self.model)

    @override
    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint."""
        if self._mesh is None:
            super()._load_best_model()
            return
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads optimizer and scheduler of a checkpoint, of any layout or of transformers' own Trainer."""
        if self._mesh is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            place = _place_of(checkpoint)
            if is_trainer(place) and not (place / "scheduler.pt").exists():
                return  # the model alone was saved
            where = (place, None) if is_trainer(place) else (place.parent, place.name)
            load_checkpoint(*where, optimizer=_plain(self.optimizer), scheduler=self.lr_scheduler)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Continues the random states of this data rank."""
        if self._mesh is None:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None and (_place_of(checkpoint) / MANIFEST).exists():
            with open_checkpoint(_place_of(checkpoint)) as stored:
                restore_random(self._mesh, stored.index.values.get("random", {}), stored.read_all("random/"))


def _place_of(directory: Any) -> Path:
    return Path(directory).resolve()


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer inside of accelerate's wrapper."""
    inner = optimizer
    while hasattr(inner, "accelerator_state"):
        inner = inner.optimizer
    return inner
