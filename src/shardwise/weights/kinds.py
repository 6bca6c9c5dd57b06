"""What a directory holds that is no directory of ours, by the names of its files: nothing of them is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import LoadError

__all__ = [
    "ADAPTER_CONFIG",
    "CONVERTIBLE",
    "DCP",
    "NXD",
    "OPTIMUM_NEURON",
    "SHARDED_SAFETENSORS",
    "check_no_checkpoint",
    "describe_kind",
    "kind_of",
    "reading",
]

ADAPTER_CONFIG = "adapter_config.json"
DCP = "a directory of torch.distributed.checkpoint (DCP)"
NXD = "a checkpoint of neuronx_distributed"
OPTIMUM_NEURON = "a sharded checkpoint of Optimum Neuron"
SHARDED_SAFETENSORS = "a distributed checkpoint of transformers (save_pretrained(distributed_checkpoint=True))"

CONVERTIBLE = frozenset({DCP, NXD, OPTIMUM_NEURON, SHARDED_SAFETENSORS})
"""Kinds that `shardwise convert` takes."""

_OWN = "one checkpoint, not the directory that holds it"
_CONVERT = "convert it: shardwise convert {} --to hf OUT, and load OUT with shardwise.load"
_LOAD = "shardwise.load loads its weights, and shardwise convert {} --to hf OUT writes them as a plain directory"
_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def _any(*patterns: str) -> Callable[[Path], bool]:
    return lambda root: any(next(root.glob(pattern), None) is not None for pattern in patterns)


_KINDS: tuple[tuple[str, Callable[[Path], bool], str], ...] = (
    (_OWN, lambda root: (root / "manifest.json").is_file(), 'pass the directory above it, and tag="{0.name}"'),
    (OPTIMUM_NEURON, _any("shards/mp_metadata_pp_rank_*.pt", "mp_metadata_pp_rank_*.pt"), _CONVERT),
    (NXD, _any("model/dp_rank_*_tp_rank_*.pt", "*/model/dp_rank_*_tp_rank_*.pt", "tp_rank_*_pp_rank_*"), _CONVERT),
    (SHARDED_SAFETENSORS, lambda root: any(_SHARD.fullmatch(each.name) for each in root.iterdir()), _LOAD),
    (DCP, _any(".metadata", "model/.metadata"), _LOAD),
    (
        "a checkpoint of DeepSpeed",
        _any("*/mp_rank_*_model_states.pt", "mp_rank_*_model_states.pt", "*/zero_pp_rank_*_model_states.pt"),
        "convert it with DeepSpeed's zero_to_fp32.py, and load what that writes with shardwise.load",
    ),
    (
        "a checkpoint of Megatron-LM",
        _any("latest_checkpointed_iteration.txt", "mp_rank_*/model_optim_rng.pt"),
        "convert it with Megatron-LM's tools/checkpoint/convert.py, and load what that writes with shardwise.load",
    ),
    ("a directory with an adapter of PEFT", _any(ADAPTER_CONFIG), "pass it as adapter= to shardwise.load"),
    (
        "a Hugging Face model directory",
        lambda root: (root / "config.json").is_file() and _any("*.safetensors", "pytorch_model*.bin")(root),
        "load it with shardwise.load",
    ),
)


@contextmanager
def reading(what: str | os.PathLike[str]) -> Iterator[None]:
    """Says of what the disk refuses in the block, such as a directory of another user's, what was to be read.

    Raises:
        LoadError: an `OSError` came out of the block.
    """
    try:
        yield
    except LoadError:
        raise
    except OSError as error:
        at = error.filename if isinstance(error.filename, str) else os.fspath(what)
        fix = "let this user read it, or name another place" if isinstance(error, PermissionError) else None
        why = error.strerror or str(error)
        raise LoadError(f"cannot read {os.path.basename(at) or at}", at=at, why=why, fix=fix) from error  # noqa: PTH119


def kind_of(path: Path) -> str | None:
    """What stands at `path`, None where it is nothing that is known."""
    return _find(path)[0]


def describe_kind(path: Path) -> dict[str, str]:
    """`why` and `fix` of an error about a directory in which no checkpoint was found."""
    kind, fix = _find(path)
    if kind is None:
        return {"fix": "pass a directory of checkpoints, as shardwise.save_checkpoint writes them"}
    return {"why": f"it is {kind}", "fix": fix.format(path)}


def check_no_checkpoint(path: str | os.PathLike[str], *, what: str = "a model") -> None:
    """Raises `LoadError` where `path` is a checkpoint of ours, or a directory of them.

    Args:
        what: is read from there: "a model", or "an adapter".
    """
    root = Path(path) if os.path.isdir(path) else None  # noqa: PTH112 - pathlib raises: a name too long
    if root is None:
        return
    with reading(path):
        if _any("model*.safetensors*")(root):
            return
        is_one = (root / "manifest.json").is_file() and (root / "tensors.json").is_file()
        is_plain = (root / "config.json").exists() or (root / ADAPTER_CONFIG).exists()
        is_many = not is_one and not is_plain and _any("*/tensors.json")(root)
    if is_one or is_many:
        option = "" if what == "a model" else " --adapter"
        raise LoadError(
            f"{os.fspath(path)!r} is {'one' if is_one else 'a directory'} of Shardwise's own checkpoints",
            why=f"{what} is read from what save_pretrained or shardwise.export_pretrained writes",
            fix="fill the model that was saved by shardwise.load_checkpoint (a run goes on by its checkpoint.dir), or\n"
            f"convert it first: shardwise convert {os.fspath(path)}{option} --to hf OUT",
        )


def _find(path: Path) -> tuple[str | None, str]:
    with reading(path):
        return next(((kind, fix) for kind, holds, fix in _KINDS if path.is_dir() and holds(path)), (None, ""))
