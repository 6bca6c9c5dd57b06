"""Answers about models, cached on disk next to the hub's cache, for these versions of the libraries and of our code."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import constants
from torch import nn

from shardwise.parallel.facts import is_of_transformers
from shardwise.runtime.modes import has_dropout
from shardwise.weights.staging import write_text

Answer = TypeVar("Answer")

logger = logging.getLogger("shardwise.plan")

_VOLATILE = ("_name_or_path", "name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures")
_PACKAGE = Path(__file__).parent.parent


def cache_path(model: nn.Module, question: str, described: Mapping[str, Any]) -> Path | None:
    """Returns the path of the cached answer to a question about a model; None if its code may be edited under the same
    name.

    Args:
        question: "plan" for its plan, or another word.
        described: what the answer depends on besides the model, the libraries and our code.
    """
    if not is_of_transformers(model):
        return None
    config: dict[str, Any] = model.config.to_dict()  # type: ignore[union-attr, operator]
    configs = [model.config, *(getattr(model.config, name, None) for name in getattr(model.config, "sub_configs", ()))]
    key = {
        "class": type(model).__qualname__,
        "modules": [(name, type(module).__name__) for name, module in model.named_modules()],
        "drops": has_dropout(model),
        "implementations": [
            (getattr(each, "_attn_implementation", None), getattr(each, "_experts_implementation", None))
            for each in configs
        ],
        "config": {name: value for name, value in config.items() if name not in _VOLATILE},
        "versions": [_source_digest(), transformers.__version__, torch.__version__],
        **described,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    suffix = "" if question == "plan" else f".{question}"
    return Path(constants.HF_HOME) / "shardwise/plans" / f"{config.get('model_type')}-{digest[:20]}{suffix}.json"


@functools.cache
def _source_digest() -> str:
    """Returns a digest of the package's source, so that an edited checkout ignores the answers of older code."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read(path: Path | None, parse: Callable[[Any], Answer]) -> Answer | None:
    """Returns `parse` of the JSON value in the file; None if there is no file, or it is damaged."""
    try:
        if path is None or not path.is_file():
            return None
        return parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, OSError) as error:
        logger.warning("ignoring the file at %s: %s", path, error)
        return None


def write(path: Path | None, value: Any) -> None:
    """Writes a JSON value; ignores write errors, after which the next call computes the answer again."""
    if path is None:
        return
    try:
        write_text(path, json.dumps(value, indent=1))
    except OSError as error:
        logger.info("cannot cache an answer on disk: %s", error)
