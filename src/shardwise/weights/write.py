"""Plain Hugging Face safetensors, streamed: one file, or numbered shards with their index.

# [Note: file by file]
All files are written to a hidden directory in the target, which is so on the same disk, and flushed. `finish` moves
them into the target one by one; it touches nothing else but older weights. Last comes what `from_pretrained` looks for
first: `model.safetensors`, or the index of the shards. Old ones of both are removed first: a crash in
between leaves no model to load, never parts of two.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from shardwise.errors import ConfigError, LoadError, ShardwiseError, one_line
from shardwise.weights.kinds import ADAPTER_CONFIG
from shardwise.weights.staging import flush_path, is_url
from shardwise.weights.tensor_file import TensorFileWriter

__all__ = ["Planned", "PlannedShards", "PretrainedWriter", "check_target"]

Planned = tuple[str, torch.dtype, Sequence[int]]

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_ENTRIES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
_STAGING = ".shardwise-export-"


class PlannedShards:
    """The shards of a directory under way, of which is known before what they will hold: tensors are written as they
    come, those of one shard in its order. Several processes may each write some of the shards.

    Args:
        staging: the directory.
        planned: name, dtype and shape of every tensor, in order.
        max_shard_bytes: of tensors per file; a larger tensor has a file to itself.

    Attributes:
        names: of the tensors of every shard.
        total_bytes: of all of them.
    """

    def __init__(self, staging: Path, planned: Sequence[Planned], *, max_shard_bytes: int) -> None:
        self._staging = staging
        self._planned: list[list[Planned]] = []
        self.total_bytes = held = 0
        for each in planned:
            nbytes = torch.Size(each[2]).numel() * each[1].itemsize
            if not self._planned or held + nbytes > max_shard_bytes:
                self._planned.append([])
                held = 0
            self._planned[-1].append(each)
            held += nbytes
            self.total_bytes += nbytes
        self.names = [[each[0] for each in shard] for shard in self._planned]
        self._places = {name: number for number, names in enumerate(self.names) for name in names}
        self._files: dict[int, tuple[TensorFileWriter, list[Planned]]] = {}

    def shard_of(self, name: str) -> int:
        """The number of the shard that holds a tensor."""
        return self._places[name]

    def path(self, number: int) -> Path:
        """Where a shard is until it has its name."""
        return self._staging / f".shard-{number}"

    def missing(self) -> list[str]:
        """The first tensor that each shard lacks; of those that other processes write, only whether they are there."""
        found = []
        for number, shard in enumerate(self._planned):
            left = self._files[number][1] if number in self._files else [] if self.path(number).exists() else shard
            found += [name for name, _, _ in left[:1]]
        return found

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next tensor of its shard; with the last one the shard is flushed to disk.

        Raises:
            LoadError: another one was planned.
            OSError: it cannot be written.
        """
        number = self._places.get(name, -1)
        facts = (name, tensor.dtype, tuple(tensor.shape))
        if number not in self._files and number >= 0:
            shard = self._planned[number]
            self._files[number] = TensorFileWriter(self.path(number), shard), list(shard)
        file, left = self._files.get(number, (None, []))
        if file is None or not left or (left[0][0], left[0][1], tuple(left[0][2])) != facts:
            raise LoadError(f"{facts} is added where {left[:1]} was planned", at=str(self._staging))
        file.write(tensor.cpu())
        del left[0]
        if not left:
            file.finish()

    def close(self) -> None:
        """Lets go of the files."""
        for file, _ in self._files.values():
            file.close()


def check_target(directory: str | os.PathLike[str]) -> None:
    """Raises `LoadError` where weights that are written to `directory` would mix with what it holds."""
    for name, what, why in (
        (ADAPTER_CONFIG, "an adapter", "from_pretrained would add it to what is written"),
        ("manifest.json", "a checkpoint", "some of its files would be replaced"),
    ):
        if os.path.isfile(Path(directory) / name):  # noqa: PTH113 - pathlib raises: a name too long
            raise LoadError(f"{str(directory)!r} holds {what}", why=why, fix="remove it, or name another directory")


class PretrainedWriter:
    """Writes weights and companion files into a directory; a context manager that removes unfinished files.

    It holds one tensor at a time. See [Note: file by file].

        with PretrainedWriter("out", max_shard_bytes=5 * 10**9, planned=[(name, tensor.dtype, tensor.shape)]) as writer:
            writer.add(name, tensor)
            with writer.companions() as staging:
                config.save_pretrained(staging)
            writer.finish()

    Args:
        directory: The target. Files of the same names and older weights in it are replaced, all others stay.
        max_shard_bytes: Bytes of tensors per file; a larger tensor has a file to itself.
        planned: Name, dtype and shape of every tensor that will be added, in that order.

    Attributes:
        staging: the hidden directory in the target that holds all files until `finish`.
        shards: the files of weights in it.

    Raises:
        ConfigError: `max_shard_bytes` is not positive.
        LoadError: the target is no directory, cannot be made, or holds an adapter or a checkpoint of ours.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_shard_bytes: int, planned: Sequence[Planned]) -> None:
        if max_shard_bytes <= 0:
            raise ConfigError(f"max_shard_bytes is {max_shard_bytes}", why="it must be positive")
        check_target(directory)
        self._target = Path(directory)
        try:
            if is_url(directory):
                raise ValueError("it is a URL")
            if self._target.exists() and not self._target.is_dir():
                raise NotADirectoryError(f"{self._target} is no directory")
            self._is_new = not self._target.exists()
            self._target.mkdir(parents=True, exist_ok=True)
            for left in self._target.glob(f"{_STAGING}*"):
                shutil.rmtree(left, ignore_errors=True)
            self.staging = self._target / f"{_STAGING}{uuid.uuid4().hex}"
            self.staging.mkdir()
        except (OSError, ValueError) as error:  # a ValueError: a NUL in the name
            raise LoadError(
                f"cannot write to {str(directory)[:100]!r}",
                why=str(error)[:300],
                fix="pass a directory that can be made and written",
            ) from error
        self.shards = PlannedShards(self.staging, planned, max_shard_bytes=max_shard_bytes)

    def __enter__(self) -> "PretrainedWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Removes what is not finished, and a directory that was made for it."""
        self.shards.close()
        shutil.rmtree(self.staging, ignore_errors=True)
        if self._is_new:
            with suppress(OSError):  # there are files in it
                self._target.rmdir()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next full tensor.

        Raises:
            LoadError: another one was planned, or the tensor cannot be written.
        """
        with self._writing():
            self.shards.write(name, tensor)

    @contextmanager
    def companions(self) -> Iterator[Path]:
        """Gives `staging` to a block in which other libraries write files beside the weights.

        Raises:
            LoadError: something in the block fails; the target is then as it was.
        """
        try:
            yield self.staging
        except ShardwiseError:
            raise
        except Exception as error:  # of the tokenizers library, a full disk is no OSError
            self.abort()
            why = one_line(error, limit=300)
            raise LoadError(f"cannot write {self._target.name}", at=str(self._target), why=why) from error

    def finish(self, metadata: Mapping[str, int | str] | None = None) -> None:
        """Writes the index, and moves all files into the target.

        Args:
            metadata: For the index file, besides `total_size`; transformers writes `total_parameters`.

        Raises:
            LoadError: a tensor was not added, or a file cannot be written. Unless files were being moved already, the
                target is then as it was.
        """
        lost = self.shards.missing()
        if lost or not self.shards.names:
            what = f"{lost[0]!r} was planned and not added" if lost else "no tensor was planned"
            raise LoadError(what, at=str(self._target))
        with self._writing():
            self._name_shards(metadata or {})
            self._move_files()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, KeyError) as error:  # KeyError: a dtype that the format does not have
            self.abort()
            raise LoadError(f"cannot write {self._target.name}", at=str(self._target), why=str(error)) from error

    def _name_shards(self, metadata: Mapping[str, int | str]) -> None:
        shards = self.shards.names
        if len(shards) == 1:
            self.shards.path(0).rename(self.staging / SAFE_WEIGHTS_NAME)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards):
            file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            self.shards.path(number).rename(self.staging / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {**metadata, "total_size": self.shards.total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.staging / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")

    def _move_files(self) -> None:
        """See [Note: file by file]."""
        moved = [path.relative_to(self.staging) for path in self.staging.rglob("*") if not path.is_dir()]
        for path in moved:
            flush_path(self.staging / path)
        old = [path for path in self._target.iterdir() if _WEIGHTS.fullmatch(path.name)]
        for path in old:
            if path.name in _ENTRIES:
                path.unlink()
        for path in sorted(moved, key=lambda path: path.name in _ENTRIES):
            (self._target / path.parent).mkdir(parents=True, exist_ok=True)
            (self.staging / path).replace(self._target / path)
        for path in old:
            if Path(path.name) not in moved:
                path.unlink(missing_ok=True)
        flush_path(self._target)
        self.abort()
