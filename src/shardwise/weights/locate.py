"""Finds the safetensors files of a checkpoint: a local directory, or a hub id through the Hugging Face cache."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from shardwise.errors import LoadError, as_error, did_you_mean
from shardwise.weights.staging import disk_errors

ADAPTER_CONFIG = "adapter_config.json"
DCP = "a directory of torch.distributed.checkpoint (DCP)"
NXD = "a checkpoint of neuronx_distributed"
OPTIMUM_NEURON = "a sharded checkpoint of Optimum Neuron"
SHARDED_SAFETENSORS = "a distributed checkpoint of transformers (save_pretrained(distributed_checkpoint=True))"

CONVERTIBLE = frozenset({DCP, NXD, OPTIMUM_NEURON, SHARDED_SAFETENSORS})  # kinds that `shardwise convert` takes

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
    (DCP, (".metadata", "model/.metadata", "pytorch_model_fsdp_0/.metadata"), _LOAD),
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
    """Returns the kind of checkpoint that the directory `path` holds; None if unknown."""
    return _find(path)[0]


def describe_kind(path: Path) -> dict[str, str]:
    """Returns `why` and `fix` of an error about a directory without a checkpoint."""
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


HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "variant",
)
"""Keyword arguments that say where files come from."""


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint, in order; with an index file, also the file of each key."""

    paths: tuple[Path, ...]
    index_path: Path | None = None
    weight_map: Mapping[str, str] | None = None


def locate_files(
    path_or_hub_id: str | os.PathLike[str], *, variant: str | None = None, **options: Any
) -> CheckpointFiles:
    """Finds `model.safetensors`, or `model.safetensors.index.json` and its shards."""
    single, index = _add_variant(SAFE_WEIGHTS_NAME, variant), _add_variant(SAFE_WEIGHTS_INDEX_NAME, variant)
    directory = locate_source(path_or_hub_id, **options)
    found = _fetch(path_or_hub_id, single, options)
    if found is not None:
        return CheckpointFiles((found,))
    index_path = _fetch(path_or_hub_id, index, options)
    if index_path is None:
        raise _no_weights(path_or_hub_id, directory and directory / (options.get("subfolder") or ""), single, index)
    weight_map = _read_weight_map(index_path)
    shards = {name: _fetch(path_or_hub_id, name, options) for name in sorted(set(weight_map.values()))}
    missing = [name for name, path in shards.items() if path is None]
    if missing:
        raise LoadError(
            f"{len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:5])}",
            at=str(index_path),
            why="the index lists them",
            fix="copy or download the missing files",
        )
    return CheckpointFiles(tuple(path for path in shards.values() if path is not None), index_path, weight_map)


def locate_source(path_or_hub_id: str | os.PathLike[str], **hub_options: Any) -> Path | None:
    """Returns the directory that `path_or_hub_id` names; None for a hub id (no directory, but a valid name).

    If the cache has nothing of a hub id, the hub is asked once. The hub's own library would retry for half a minute.
    """
    path = Path(path_or_hub_id)
    exists = os.path.exists(path)  # noqa: PTH110 - pathlib raises where a name is too long
    if exists and path.is_dir():
        return path
    try:
        if exists or not isinstance(path_or_hub_id, str):
            raise HFValidationError
        validate_repo_id(path_or_hub_id)
    except HFValidationError:
        siblings = [entry.name for entry in path.parent.iterdir()] if os.path.isdir(path.parent) else []  # noqa: PTH112
        what = "it is a file" if exists else f"there is no such directory{did_you_mean(path.name, siblings)}"
        raise LoadError(
            f"nothing can be loaded from {os.fspath(path_or_hub_id)!r}",
            why=f"{what}, and the name is not a hub id either (`name` or `owner/name`)",
            fix="check the path",
        ) from None
    cache = Path(hub_options.get("cache_dir") or huggingface_hub.constants.HF_HUB_CACHE)
    is_cached = (cache / f"models--{path_or_hub_id.replace('/', '--')}").is_dir()
    if not (is_cached or hub_options.get("local_files_only") or hub_options.get("proxies")):
        _check_hub(path_or_hub_id, hub_options)
    return None


def _check_hub(hub_id: str, options: Mapping[str, Any]) -> None:
    what = f"cannot reach the hub for {hub_id!r}, and there is no such directory here"
    fix = "pass an existing directory, or a hub id that is reachable or cached"
    # If the hub answers with an error, it is reported when a file is fetched.
    with as_error(LoadError, what, fix=fix), suppress(HfHubHTTPError):
        url = huggingface_hub.hf_hub_url(hub_id, "config.json", revision=options.get("revision"))
        huggingface_hub.get_hf_file_metadata(url, token=options.get("token"))


def _add_variant(name: str, variant: str | None) -> str:
    # As transformers does: `model.fp16.safetensors`, `model.safetensors.index.fp16.json`.
    stem, _, suffix = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def _no_weights(source: str | os.PathLike[str], directory: Path | None, single: str, index: str) -> LoadError:
    is_there = directory is not None and directory.is_dir()
    names = sorted(entry.name for entry in directory.iterdir() if entry.exists()) if directory and is_there else []
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        return LoadError(
            "the checkpoint holds no safetensors, only pickled weights",
            at=str(directory),
            why=f"found {', '.join(pickles[:3])}",
            fix="Shardwise executes no pickle. Convert once where you trust the file: "
            "AutoModel.from_pretrained(path).save_pretrained(new_path) writes safetensors",
        )
    shown = [name for name in names if ".safetensors" in name] or names
    return LoadError(
        f"{os.fspath(source)!r} holds no {single} and no {index}",
        at=str(directory or source),
        why=f"found {', '.join(shown[:8]) or 'nothing (in the repository or, offline, in the cache)'}",
        fix="pass the name and revision, variant= and subfolder= that the weights have",
    )


def _fetch(source: str | os.PathLike[str], name: str, options: dict[str, Any]) -> Path | None:
    with disk_errors(f"cannot open the checkpoint {os.fspath(source)!r}"):  # also what the hub and connections raise
        found = cached_file(os.fspath(source), name, _raise_exceptions_for_missing_entries=False, **options)
    return Path(found) if found is not None else None


def _read_weight_map(path: Path) -> dict[str, str]:
    what = f"{path.name} is not an index of safetensors shards, a JSON object with a weight_map"
    kinds, fix = (ValueError, KeyError, TypeError, AttributeError), "copy or download the file again"
    with disk_errors(f"cannot read {path}"), as_error(LoadError, what, *kinds, at=str(path), fix=fix):
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {key: os.fspath(name) for key, name in weight_map.items()}
