"""Converts a sharded checkpoint to one Hugging Face directory."""

import os
from pathlib import Path

from shardwise.api.converting import convert_to_hf, open_anywhere
from shardwise.errors import ConfigError

__all__ = ["consolidate_model_parallel_checkpoints_to_unified_checkpoint"]


def consolidate_model_parallel_checkpoints_to_unified_checkpoint(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str], save_format: str = "safetensors"
) -> None:
    """Writes the model of a sharded checkpoint for `from_pretrained`, with its config, tensor by tensor. Call it in one
    process.

    `shardwise convert CHECKPOINT_DIR --to hf OUTPUT_DIR` does the same.

    Raises:
        ConfigError: `save_format` is not safetensors, or `output_dir` is not empty.
        LoadError: the checkpoint is missing or damaged.
        UnsupportedError: it holds only the trained parameters of a frozen model.
    """
    if save_format != "safetensors":
        raise ConfigError(f"save_format is {save_format!r}", why="no pickles are written", fix='use "safetensors"')
    if Path(output_dir).is_dir() and any(Path(output_dir).iterdir()):
        raise ConfigError(f"{output_dir} is not empty", fix="remove it or name another; nothing is overwritten")
    with open_anywhere(checkpoint_dir) as stored:
        convert_to_hf(stored, output_dir)
