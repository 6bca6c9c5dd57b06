"""A checkpoint that has been prepared, and the writing of it.

# [Note: how a checkpoint comes to be]
All ranks write into a hidden directory next to the tag's: each its own tensor files, checksummed and flushed. Rank 0
gathers what they have written, checks that it is complete, and writes the index and, last of all, the manifest; then
the directory takes its name, and `latest` names it. Old tags are deleted after that. Whatever fails before leaves
nothing but the hidden directory, which is removed at once, or by the next save where the process was killed.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.checkpoint.content import HeldTensor, OptimizerContent, model_key, state_key
from shardwise.checkpoint.directory import LATEST, check_place, clean, list_checkpoints, lock, prune, writing
from shardwise.checkpoint.manifest import INDEX, Index, StoredTensor, part_name, write_index, write_manifest
from shardwise.checkpoint.schema import FileFacts, Manifest, Part
from shardwise.comm.agree import raise_on_all_ranks
from shardwise.comm.operations import Group, all_gather_objects
from shardwise.errors import LoadError, RankError, ShardwiseError
from shardwise.mesh import Mesh
from shardwise.parameters.registry import local_part
from shardwise.sharding.boxes import Box, full_box, volume
from shardwise.sharding.division import Portion
from shardwise.sharding.layout import Layout
from shardwise.weights.staging import StagedDirectory, atomic_file
from shardwise.weights.tensor_file import TensorFileWriter

__all__ = ["OwnPortions", "SaveJob", "SaveRequest", "as_load_error"]

logger = logging.getLogger("shardwise.checkpoint")

OwnPortions = tuple[tuple[Box, tuple[slice, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Where a checkpoint goes, and what becomes of older ones; the same on every rank.

    Attributes:
        root: the directory of checkpoints.
        tag: of this one; None: named after the step, or by its number.
        step: of the training, where it is known.
        keep_last: how many of the newest are kept; None: all.
        keep_every: those whose step is a multiple of it are never deleted; None: all may be.
        num_writers: files that each rank writes at a time.
    """

    root: Path
    tag: str | None = None
    step: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    num_writers: int = 1


@dataclass(frozen=True)
class _Written:
    """A part that this rank writes: of which tensor, which elements, and these."""

    key: str
    box: Box
    value: Tensor


@dataclass
class SaveJob:
    """All that is left to be done when a checkpoint has been prepared; nothing of it reads the model again once
    `take_copies` has been called.

    Attributes:
        request: where it goes.
        mesh: the ranks.
        rank: this one's number in the mesh.
        content: "all" or "trained".
        model_name: of the model's class.
        written: this rank's parts.
        described: of the tensors that this rank answers for, dtype, canonical shape and layout.
        optimizer: class name, and by the parameters that this rank answers for options and states.
        tied: alias to canonical name.
        values: what is no tensor of the model or optimizer; rank 0's are written.
        companions: further files by name, and what writes their content in the end.
        versions: of the libraries.
        fault: why this rank has no copies; raised on all of them by `run`.
    """

    request: SaveRequest
    mesh: Mesh
    rank: int
    content: Literal["all", "trained"]
    model_name: str
    written: list[_Written] = field(default_factory=list)
    described: dict[str, tuple[torch.dtype, tuple[int, ...], Layout]] = field(default_factory=dict)
    optimizer: tuple[str, dict[str, Any]] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    companions: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    fault: Exception | None = None

    def add_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that this rank alone writes, as they are."""
        for key, value in tensors.items():
            self._describe(key, value, Layout(tuple(value.shape)))
            if value.numel():
                self.written.append(_Written(key, full_box(tuple(value.shape)), value))

    def add_portions(
        self, held: HeldTensor, portions: tuple[Portion, ...], own: OwnPortions, optimizer: OptimizerContent | None
    ) -> None:
        """Adds this rank's portions of a tensor of the model, and of the optimizer's states of it.

        Args:
            portions: of the tensor, over all ranks.
            own: this rank's, each with where it is in the local tensor.
        """
        answers = portions[0].rank == self.rank if portions else not any(self.mesh.coords.values())
        states = optimizer.described.get(held.name) if optimizer is not None else None
        like = {model_key(held.name): local_part(held.value).detach()}
        for state, facts in (states or {}).items():
            key, tensor = state_key(held.name, state), optimizer.tensors.get((held.name, state)) if optimizer else None
            if "like" in facts and tensor is not None:
                like[key] = tensor
            elif "whole" in facts and tensor is not None and answers:
                self.add_tensors({key: tensor})
            elif "ranks" in facts and tensor is not None:
                self.add_tensors({f"{key}@{self.rank}": tensor})
        for key, value in like.items():
            if answers:
                self._describe(key, value, held.layout)
            self.written += [_Written(key, box, value[place]) for box, place in own]
        if answers and optimizer is not None and self.optimizer is not None and states is not None:
            self.optimizer[1][held.name] = {"options": optimizer.options[held.name], "states": states}

    def _describe(self, key: str, value: Tensor, layout: Layout) -> None:
        self.described[key] = (value.dtype, layout.shape, layout)

    def take_copies(self, buffers: dict[tuple[str, Box], Tensor]) -> None:
        """Copies what is to be written into `buffers`, those of the last time where they fit. An error is kept: `run`,
        which all ranks call, raises it.
        """
        try:
            self._take_copies(buffers)
        except (RuntimeError, MemoryError) as error:
            buffers.clear()
            self.fault = LoadError(
                f"rank {self.rank} cannot copy what is to be saved to host memory",
                at=str(self.request.root),
                why=str(error)[:300],
                fix="save without async_save: it needs a buffer of a few MB",
            )

    def _take_copies(self, buffers: dict[tuple[str, Box], Tensor]) -> None:
        pinned = self.mesh.device.type == "cuda"
        kept = {}
        for number, each in enumerate(self.written):
            buffer = buffers.get((each.key, each.box))
            if buffer is None or buffer.shape != each.value.shape or buffer.dtype != each.value.dtype:
                buffer = torch.empty(each.value.shape, dtype=each.value.dtype, device="cpu", pin_memory=pinned)
            buffer.copy_(each.value, non_blocking=pinned)
            kept[each.key, each.box] = buffer
            self.written[number] = _Written(each.key, each.box, buffer)
        if pinned:
            torch.cuda.synchronize(self.mesh.device)
        buffers.clear()
        buffers.update(kept)

    def run(self, group: Group | None, spread: Callable[..., list[Any]]) -> str:
        """Writes the checkpoint; returns its tag. All ranks of `group` call it.

        Args:
            spread: calls a function for each of some arguments, several at a time; returns the results.

        Raises:
            LoadError: it cannot be written; the same on every rank. What was there is still there.

        Communicates: five gathers of small objects over `group`.
        """
        staged: StagedDirectory | None = None
        with ExitStack() as alone:
            with raise_on_all_ranks(group, "opening the checkpoint's directory"), as_load_error(self.request.root):
                if self.fault is not None:
                    raise self.fault
                if self.rank == 0:
                    alone.enter_context(writing(self.request.root))
                    staged = self._open()
                    alone.callback(staged.abort)
            place = next(each for each in all_gather_objects(staged and str(staged.path), group) if each)
            with raise_on_all_ranks(group, "writing the checkpoint"), as_load_error(self.request.root):
                report = self._write(Path(place), spread)
            reports = all_gather_objects(report, group)
            with raise_on_all_ranks(group, "completing the checkpoint"), as_load_error(self.request.root):
                tag = self._finish(staged, reports) if staged is not None else None
            return next(each for each in all_gather_objects(tag, group) if each)

    def _open(self) -> StagedDirectory:
        request = self.request
        lock(request.root)
        clean(request.root)
        tag = request.tag or (f"step-{request.step}" if request.step is not None else f"save-{self._number()}")
        check_place(request.root / tag)
        return StagedDirectory(request.root / tag)

    def _number(self) -> int:
        known = [each.number for _, _, each in list_checkpoints(self.request.root) if isinstance(each, Manifest)]
        return max(known, default=0) + 1

    def _write(self, directory: Path, spread: Callable[..., list[Any]]) -> _Report:
        """Writes this rank's files, several at a time if that was asked for; on every rank."""
        if not directory.is_dir():
            raise LoadError(
                f"rank {self.rank} does not see the checkpoint's directory",
                at=str(directory),
                why="rank 0 has made it, and every rank writes its part into it",
                fix="save to a directory that all machines share",
            )
        groups = _deal(self.written, self.request.num_writers)
        names = [f"rank-{self.rank:05d}" + f"-{number}" * (len(groups) > 1) for number in range(len(groups))]
        paths = [directory / f"{name}.safetensors" for name in names]
        files = spread(_write_file, list(zip(paths, groups, strict=True)))
        return _Report(files, self.described, self.optimizer[1] if self.optimizer is not None else {})

    def _finish(self, staged: StagedDirectory, reports: list[_Report]) -> str:
        """Completes the checkpoint when every rank has written; on rank 0."""
        request, directory = self.request, staged.path
        index, files = self._index(reports)
        files[INDEX] = write_index(directory, index)
        for name, make in self.companions.items():
            content = make()
            (directory / name).write_bytes(content)
            files[name] = FileFacts(len(content), zlib.crc32(content))
        manifest = Manifest(
            number=self._number(),
            tag=staged.target.name,
            step=request.step,
            content=self.content,
            layout=str(self.mesh.shape),
            model=self.model_name,
            time=time.time(),
            versions=self.versions,
            files=files,
        )
        write_manifest(directory, manifest)
        staged.commit()
        try:
            with atomic_file(request.root / LATEST) as partial:
                partial.write_text(f"{manifest.tag}\n", encoding="utf-8")
        except OSError as error:  # it decides nothing: a full disk, which deleting older ones may make room on
            logger.warning("%s is complete, and %s could not be written: %s", staged.target, LATEST, error)
        if request.keep_last is not None:
            prune(request.root, keep_last=request.keep_last, keep_every=request.keep_every)
        return manifest.tag

    def _index(self, reports: list[_Report]) -> tuple[Index, dict[str, FileFacts]]:
        """What the ranks have written, put together and found complete."""
        names = tuple(file.name for report in reports for file in report.files)
        described = {key: facts for report in reports for key, facts in report.described.items()}
        parts: dict[str, list[Part]] = {key: [] for key in described}
        for number, file in enumerate(file for report in reports for file in report.files):
            for key, crc, box in file.parts:
                parts.setdefault(key, []).append(Part(number, crc, box))
        for key, found in parts.items():
            whole = volume(full_box(described[key][1])) if key in described else -1
            if sum(volume(part.box) for part in found) != whole:
                raise RankError(f"the ranks have not written {key} once and completely", why="they hold it differently")
        optimizer = None
        if self.optimizer is not None:
            given = {name: facts for report in reports for name, facts in report.optimizer.items()}
            optimizer = {"class": self.optimizer[0], **_grouped(given)}
        tensors = {key: StoredTensor(*described[key][:2], tuple(parts[key]), described[key][2]) for key in described}
        facts = {file.name: FileFacts(file.num_bytes, file.header_crc) for each in reports for file in each.files}
        return Index(names, tensors, self.tied, optimizer, self.values), facts


@dataclass(frozen=True)
class _File:
    """A tensor file that was written: its parts are key, CRC-32 and box."""

    name: str
    num_bytes: int
    header_crc: int
    parts: list[tuple[str, int, Box]]


@dataclass(frozen=True)
class _Report:
    """What a rank has written, for rank 0."""

    files: list[_File]
    described: dict[str, tuple[torch.dtype, tuple[int, ...], Layout]]
    optimizer: dict[str, Any]


def _write_file(file_and_parts: tuple[Path, list[_Written]]) -> _File:
    path, written = file_and_parts
    ordered = sorted(written, key=lambda each: -each.value.dtype.itemsize)
    header = [(part_name(each.key, each.box), each.value.dtype, each.value.shape) for each in ordered]
    with TensorFileWriter(path, header) as file:
        parts = [(each.key, file.write(each.value.cpu()), each.box) for each in ordered]
    return _File(path.name, file.num_bytes, file.header_crc, parts)


def _deal(written: list[_Written], num_groups: int) -> list[list[_Written]]:
    """`written` in groups of about the same number of bytes; none of them empty."""
    groups: list[list[_Written]] = [[] for _ in range(num_groups)]
    sizes = [0] * num_groups
    for each in sorted(written, key=lambda each: -each.value.nbytes) if num_groups > 1 else written:
        number = sizes.index(min(sizes))
        sizes[number] += each.value.nbytes
        groups[number].append(each)
    return [group for group in groups if group]


def _grouped(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of parameters, each different set of them once."""
    groups: list[Any] = []
    parameters = {}
    for name, facts in given.items():
        if facts["options"] not in groups:
            groups.append(facts["options"])
        parameters[name] = {"group": groups.index(facts["options"]), "states": facts["states"]}
    return {"groups": groups, "parameters": parameters}


@contextmanager
def as_load_error(root: Path) -> Iterator[None]:
    """Says of an error of the disk which checkpoint it was."""
    try:
        yield
    except ShardwiseError:
        raise
    except OSError as error:
        raise LoadError(
            "the checkpoint cannot be written",
            at=str(error.filename or root),
            why=str(error),
            fix="make room, or save to another directory; checkpoints that were complete still are",
        ) from error
