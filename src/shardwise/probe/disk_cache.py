"""What was found out about a model, kept on disk next to the hub's cache: for these versions of the libraries."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers import PreTrainedModel

from shardwise.runtime.modes import has_dropout
from shardwise.weights.staging import atomic_file

__all__ = ["keep", "path_of", "read_kept"]

Kept = TypeVar("Kept")

logger = logging.getLogger("shardwise.plan")

_VOLATILE = ("_name_or_path", "name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures")


def path_of(model: nn.Module, kind: str, described: Mapping[str, Any]) -> Path | None:
    """Where what is known of this architecture at this size is kept; None for classes that have no lasting name.

    Args:
        kind: "plan" for how it is split, or another word.
        described: what else it depends on, besides the model and the versions of the libraries.
    """
    if not isinstance(model, PreTrainedModel) or not type(model).__module__.startswith("transformers."):
        return None
    config: dict[str, Any] = model.config.to_dict()
    known = {
        "class": type(model).__qualname__,
        "modules": [(name, type(module).__name__) for name, module in model.named_modules()],
        "drops": has_dropout(model),
        "attention": getattr(model.config, "_attn_implementation", None),
        "config": {name: value for name, value in config.items() if name not in _VOLATILE},
        "versions": [version("shardwise"), transformers.__version__, torch.__version__],
        **described,
    }
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
    suffix = "" if kind == "plan" else f".{kind}"
    return Path(constants.HF_HOME) / "shardwise" / "plans" / f"{model.config.model_type}-{digest[:20]}{suffix}.json"


def read_kept(path: Path | None, parse: Callable[[Any], Kept]) -> Kept | None:
    """What `parse` makes of the JSON value that was kept; None where there is none, or a `ValueError`."""
    try:
        if path is None or not path.is_file():
            return None
        return parse(json.loads(path.read_text()))
    except PermissionError:  # of another user: what is in there is found out again
        return None
    except (ValueError, OSError, RecursionError):
        logger.warning("ignoring the damaged file at %s", path)
        return None


def keep(path: Path | None, value: Any) -> None:
    """Writes a JSON value; if that fails, it is found out again next time."""
    if path is None:
        return
    try:
        with atomic_file(path) as partial:
            partial.write_text(json.dumps(value, indent=1))
    except OSError as error:
        logger.info("cannot keep what was found out: %s", error)
