"""Plain Hugging Face safetensors, streamed: one file, or numbered shards with their index.

Everything is written to a hidden directory next to the target. `finish` adds to it the target's other files (as hard
links) and moves it into place, as [Note: replacing a directory] in `weights/staging.py` says.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shardwise.errors import ConfigError, LoadError
from shardwise.weights.staging import StagedDirectory
from shardwise.weights.tensor_file import TensorFileWriter

__all__ = ["PretrainedWriter"]

Planned = tuple[str, torch.dtype, Sequence[int]]

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


class PretrainedWriter:
    """Writes a model directory; a context manager that leaves the target as it was when something fails.

    Memory is bounded by one shard, or with `planned` by one tensor. Other files of the model (config, tokenizer) go
    into `staging` before `finish`.

        with PretrainedWriter("out", max_shard_bytes=5 * 10**9) as writer:
            config.save_pretrained(writer.staging)
            writer.add("model.embed_tokens.weight", tensor)
            writer.finish()

    Args:
        directory: The target. What else it holds is kept; older weights of the same names are replaced or removed.
        max_shard_bytes: Of tensors per file; a larger tensor has a file to itself.
        planned: Name, dtype and shape of every tensor that will be added, in that order: each is written when it comes.

    Raises:
        ConfigError: `max_shard_bytes` is not positive.
        LoadError: the target is a file, or the directory next to it cannot be made.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, max_shard_bytes: int, planned: Sequence[Planned] | None = None
    ) -> None:
        if max_shard_bytes <= 0:
            raise ConfigError(f"max_shard_bytes is {max_shard_bytes}", why="it must be positive")
        self._max_shard_bytes = max_shard_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensors_bytes = 0
        self._names: set[str] = set()
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._planned = None if planned is None else _planned_shards(planned, max_shard_bytes)
        self._open: TensorFileWriter | None = None
        try:
            self._staged = StagedDirectory(directory)
        except (OSError, ValueError) as error:  # a ValueError: a NUL in the name
            raise LoadError(
                f"cannot write next to {str(directory)[:100]!r}",
                why=str(error)[:300],
                fix="pass a directory that can be made",
            ) from error
        self._target, self.staging = self._staged.target, self._staged.path

    def __enter__(self) -> "PretrainedWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Throw away what was written. Nothing happens after `finish`."""
        self._tensors.clear()
        if self._open is not None:
            self._open.close()
        self._staged.abort()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a full tensor; held until its shard is full, then written, or written at once where it was planned.

        Raises:
            LoadError: `name` was added before, or the shard cannot be written.
        """
        if name in self._names:
            raise LoadError(f"{name!r} is written twice", at=str(self._target))
        if self._planned is not None:
            with self._writing():
                self._stream(name, tensor)
            return
        if self._tensors and self._tensors_bytes + tensor.nbytes > self._max_shard_bytes:
            with self._writing():
                self._write_shard()
        self._names.add(name)
        self._tensors[name] = tensor
        self._tensors_bytes += tensor.nbytes

    def finish(self, metadata: Mapping[str, int | str] | None = None) -> None:
        """Write the last shard and the index, and move everything into place.

        Args:
            metadata: For the index file, besides `total_size`; transformers writes `total_parameters`.

        Raises:
            LoadError: nothing was added, or a file cannot be written; the target is then as it was.
        """
        if not self._tensors and not self._shards:
            raise LoadError("no tensor was added", at=str(self._target))
        if self._planned:
            raise LoadError(f"{self._planned[0][0][0]!r} was planned and not added", at=str(self._target))
        with self._writing():
            if self._tensors:
                self._write_shard()
            self._name_shards(metadata or {})
            self._take_other_files()
            self._staged.commit()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, KeyError) as error:  # KeyError: a dtype that the format does not have
            self.abort()
            raise LoadError(f"cannot write {self._target.name}", at=str(self._target), why=str(error)) from error

    def _stream(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next planned tensor."""
        shard = self._planned[0] if self._planned else []
        facts = (name, tensor.dtype, tuple(tensor.shape))
        if not shard or (shard[0][0], shard[0][1], tuple(shard[0][2])) != facts:
            raise LoadError(f"{facts} is added where {shard[:1]} was planned", at=str(self._target))
        if self._open is None:
            self._open = TensorFileWriter(self._shard_path(len(self._shards)), shard)
            self._shards.append([])
        self._open.write(tensor.cpu())
        self._names.add(name)
        self._shards[-1].append(name)
        self._total_bytes += tensor.nbytes
        del shard[0]
        if not shard and self._planned is not None:
            self._open.close()
            self._open = None
            del self._planned[0]

    def _shard_path(self, position: int) -> Path:
        return self.staging / f".shard-{position}"

    def _write_shard(self) -> None:
        written: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for name, tensor in self._tensors.items():
            value = tensor.detach().cpu().contiguous()
            storage = value.untyped_storage().data_ptr()
            written[name] = value.clone() if storage in storages else value  # each name has a copy of its own in a file
            storages.add(storage)
        save_file(written, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._tensors))
        self._total_bytes += self._tensors_bytes
        self._tensors, self._tensors_bytes = {}, 0

    def _name_shards(self, metadata: Mapping[str, int | str]) -> None:
        count = len(self._shards)
        if count == 1:
            self._shard_path(0).rename(self.staging / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for position, names in enumerate(self._shards):
            file_name = f"model-{position + 1:05d}-of-{count:05d}.safetensors"
            self._shard_path(position).rename(self.staging / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {**metadata, "total_size": self._total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.staging / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _take_other_files(self) -> None:
        if not self._target.is_dir():
            return
        for entry in self._target.iterdir():
            ours = self.staging / entry.name
            if ours.exists() or _WEIGHTS.fullmatch(entry.name):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, ours, symlinks=True, copy_function=_link)
            else:
                _link(entry, ours)


def _planned_shards(planned: Sequence[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = []
    held = 0
    for each in planned:
        nbytes = torch.Size(each[2]).numel() * each[1].itemsize
        if not shards or held + nbytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(each)
        held += nbytes
    return shards


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)
