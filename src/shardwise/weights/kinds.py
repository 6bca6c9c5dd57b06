"""Recognizes a directory by the names of its files. Opens no file."""

import os
from pathlib import Path

from shardwise.errors import LoadError
from shardwise.weights.staging import disk_errors

ADAPTER_CONFIG = "adapter_config.json"
DCP = "a directory of torch.distributed.checkpoint (DCP)"
NXD = "a checkpoint of neuronx_distributed"
OPTIMUM_NEURON = "a sharded checkpoint of Optimum Neuron"
SHARDED_SAFETENSORS = "a distributed checkpoint of transformers (save_pretrained(distributed_checkpoint=True))"

CONVERTIBLE = frozenset({DCP, NXD, OPTIMUM_NEURON, SHARDED_SAFETENSORS})
"""Kinds that `shardwise convert` takes."""

_CONVERT = "convert it: shardwise convert {} --to hf OUT, and load OUT with shardwise.load"
_LOAD = "shardwise.load loads its weights, and shardwise convert {} --to hf OUT writes them as a plain directory"
_KINDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "one checkpoint, not the directory that holds it",
        ("manifest.json",),
        'pass the directory above it, and tag="{0.name}"',
    ),
    (OPTIMUM_NEURON, ("shards/mp_metadata_pp_rank_*.pt", "mp_metadata_pp_rank_*.pt"), _CONVERT),
    (NXD, ("model/dp_rank_*_tp_rank_*.pt", "*/model/dp_rank_*_tp_rank_*.pt", "tp_rank_*_pp_rank_*"), _CONVERT),
    (SHARDED_SAFETENSORS, ("shard-?????-model-?????-of-?????.safetensors",), _LOAD),
    (DCP, (".metadata", "model/.metadata"), _LOAD),
    (
        "a checkpoint of DeepSpeed",
        ("*/mp_rank_*_model_states.pt", "mp_rank_*_model_states.pt", "*/zero_pp_rank_*_model_states.pt"),
        "convert it with DeepSpeed's zero_to_fp32.py, and load what that writes with shardwise.load",
    ),
    (
        "a checkpoint of Megatron-LM",
        ("latest_checkpointed_iteration.txt", "mp_rank_*/model_optim_rng.pt"),
        "convert it with Megatron-LM's tools/checkpoint/convert.py, and load what that writes with shardwise.load",
    ),
    ("a directory with an adapter of PEFT", (ADAPTER_CONFIG,), "pass it as adapter= to shardwise.load"),
    ("a Hugging Face model directory", ("*.safetensors", "pytorch_model*.bin"), "load it with shardwise.load"),
)
"""Kind, patterns of which one file is enough, and what to do with it; the first that fits holds."""


def kind_of(path: Path) -> str | None:
    """Kind of the directory `path`; None if unknown."""
    return _find(path)[0]


def describe_kind(path: Path) -> dict[str, str]:
    """`why` and `fix` of an error about a directory without a checkpoint."""
    kind, fix = _find(path)
    if kind is None:
        return {"fix": "pass a directory of checkpoints, as shardwise.save_checkpoint writes them"}
    return {"why": f"it is {kind}", "fix": fix.format(path)}


def check_no_checkpoint(path: str | os.PathLike[str], *, what: str = "a model") -> None:
    """Raises `LoadError` if `path` is one of our checkpoints, or a directory of them.

    Args:
        what: what the caller wants to read there: "a model", or "an adapter".
    """
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib raises: a name too long
        return
    root = Path(path)
    with disk_errors(f"cannot read {root}"):
        is_plain = _has(root, "model*.safetensors*", "config.json", ADAPTER_CONFIG)
        is_one = _has(root, "manifest.json") and _has(root, "tensors.json")
        is_many = not is_plain and _has(root, "*/tensors.json")
    if is_one or is_many:
        option = "" if what == "a model" else " --adapter"
        raise LoadError(
            f"{os.fspath(path)!r} is {'one' if is_one else 'a directory'} of Shardwise's own checkpoints",
            why=f"{what} is read from what save_pretrained or shardwise.export_pretrained writes",
            fix="fill the model that was saved by shardwise.load_checkpoint (a run goes on by its checkpoint.dir), or\n"
            f"convert it first: shardwise convert {os.fspath(path)}{option} --to hf OUT",
        )


def _find(path: Path) -> tuple[str | None, str]:
    with disk_errors(f"cannot read {path}"):
        return next(((kind, fix) for kind, patterns, fix in _KINDS if _has(path, *patterns)), (None, ""))


def _has(root: Path, *patterns: str) -> bool:
    return any(next(root.glob(pattern), None) is not None for pattern in patterns)
