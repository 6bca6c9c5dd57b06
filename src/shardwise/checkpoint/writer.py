"""Saving: what each rank writes of a checkpoint, and the writing.

# [Note: how a checkpoint is made]
All ranks write into a hidden directory next to the tag's: each its own tensor files, with checksums, flushed to disk.
Rank 0 gathers what they have written, checks that it is complete, and writes the index and, last of all, the manifest.
Then the directory gets its name, and `latest` names it. Old tags are deleted after that. A failure before leaves
nothing but the hidden directory, which is removed at once, or by the next save where the process was killed.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import operator
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.checkpoint.collect import (
    LocalShard,
    OptimizerContent,
    RankFacts,
    SaveInputs,
    collect_inputs,
    model_key,
    read_source,
    slices_of,
    state_key,
)
from shardwise.checkpoint.manifest import INDEX, FileFacts, Manifest, part_name, write_index, write_manifest
from shardwise.checkpoint.store import LATEST, check_place, clean, list_checkpoints, lock, prune, writing
from shardwise.comm.agree import agree, gather_from_all, raise_on_all_ranks
from shardwise.comm.operations import Group, all_gather_objects, gather_objects
from shardwise.errors import ConfigError, LoadError, RankError, ShardwiseError
from shardwise.mesh import Mesh
from shardwise.parameters.at_rest import reshard
from shardwise.parameters.registry import Registry, local_part, registry_of
from shardwise.parameters.replicas import check_replicas
from shardwise.sharding.boxes import Box, full_box, volume
from shardwise.sharding.division import Division, divide_boxes
from shardwise.sharding.layout import Layout
from shardwise.versions import __version__
from shardwise.weights.staging import StagedDirectory, atomic_file
from shardwise.weights.tensor_file import TensorFileWriter

__all__ = ["RankReport", "SaveJob", "SaveRequest", "as_load_error", "prepare_save", "write_reported_index"]

logger = logging.getLogger("shardwise.checkpoint")


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Where a checkpoint goes, and which older ones are deleted; the same on every rank.

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


@torch.no_grad()
def prepare_save(
    make_request: Callable[[], SaveRequest],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    loss_scale: Mapping[str, Any] | None,
    extra: Any,
    companions: Mapping[str, Callable[[], bytes]],
) -> SaveJob:
    """The checkpoint as it is to be written: views of what is saved. All ranks call it.

    Args:
        make_request: where it goes; an error that it raises is raised on every rank.
        companions: the contents of further files, by name, besides the model's configuration.

    Raises:
        ConfigError: something cannot be saved, or ranks ask for different checkpoints. The same on every rank.
        LayoutError: ranks hold different copies of a parameter, or of an optimizer's state of one.

    Communicates: over all ranks, what `agree` does, and one gather of a small object.
    """
    registry = registry_of(model)
    mesh = registry.mesh
    reshard(model)
    fault: Exception | None = None
    collected: list[tuple[SaveRequest, SaveInputs]] = []
    try:
        asked = make_request()
        options = {"scheduler": scheduler, "loss_scale": loss_scale, "extra": extra}
        collected.append((asked, collect_inputs(model, registry, vars(asked), optimizer=optimizer, **options)))
    except Exception as error:  # noqa: BLE001 - raised by `agree`, on every rank
        fault = error
    balances = agree(
        mesh.group(),
        collected[0][1].request if collected else {},
        doing="save_checkpoint",
        what="ranks ask for different checkpoints",
        fix="pass the same on every rank; what belongs to a rank alone is not kept",
        fault=fault,
        numbers=[collected[0][1].balance if collected else 0],
        error=ConfigError,
    )
    request, inputs = collected[0]
    if sum(balance for (balance,) in balances) % 2**64:
        check_replicas(model, inputs.copies())
    everyone = all_gather_objects((mesh.position, inputs.facts), mesh.group())
    facts = [each for _, each in sorted(everyone, key=operator.itemgetter(0))]
    left_out = _names_left_out(registry, facts)
    division = _divide(registry, facts, left_out)
    split = registry.model() or model
    job = SaveJob(
        request=request,
        mesh=mesh,
        rank=mesh.position,
        content="trained" if left_out else "all",
        model_name=type(split).__name__,
        optimizer=(inputs.optimizer.class_name, {}) if inputs.optimizer is not None else None,
        tied=dict(registry.tied),
        values={**inputs.values, **({"source": read_source(registry)} if left_out else {})},
        companions={**_companions(split), **companions} if mesh.position == 0 else {},
        versions=_versions(),
    )
    for name in division:
        if name in inputs.shards:
            job.add_shard(inputs.shards[name], division, inputs.optimizer)
    job.add_tensors(inputs.random)
    if job.rank == 0:
        job.add_tensors(inputs.tensors)
    return job


def _names_left_out(registry: Registry, everyone: Sequence[RankFacts]) -> set[str]:
    """Parameters that are not saved: the frozen weights under adapters that are still as they were read."""
    if not any(each.has_adapters for each in everyone):
        return set()
    each_parameter = zip(registry.entries, *(facts.left_out for facts in everyone), strict=True)
    return {name for name, *left_out in each_parameter if all(left_out)}


def _divide(registry: Registry, everyone: Sequence[RankFacts], left_out: set[str]) -> Division:
    """Which rank writes what of parameters and buffers: the same on every rank."""
    shape, pipeline = registry.mesh.shape, registry.plan.pipeline
    layouts: dict[str, Layout] = {
        name: entry.layout for name, entry in registry.entries.items() if name not in left_out
    }
    holders: dict[str, list[int]] = {}
    buffers = {name for facts in everyone for name in facts.buffers}
    for rank, facts in enumerate(everyone):
        for name, layout in facts.unknown.items():
            layouts.setdefault(name, layout)
            if pipeline is not None and name in buffers and shape.coords(rank)["pp"] != pipeline.coord_computing(name):
                continue  # what a forward has counted is with the stage that runs it
            if name not in registry.entries and not (name in buffers and name in holders):
                holders.setdefault(name, []).append(rank)  # of buffers the first rank's: others may have counted more
    return divide_boxes(layouts, shape, holders=holders)


def _companions(model: nn.Module) -> dict[str, Callable[[], bytes]]:
    """The model's configuration, as transformers would write it: with it, the weights are a model."""
    if not isinstance(model, PreTrainedModel):
        return {}
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    companions: dict[str, Callable[[], bytes]] = {"config.json": functools.partial(_as_json, config)}
    if model.can_generate() and model.generation_config is not None:
        companions["generation_config.json"] = functools.partial(_as_json, copy.deepcopy(model.generation_config))
    return companions


def _as_json(config: Any) -> bytes:
    text: str = config.to_json_string(use_diff=True)
    return text.encode()


@functools.cache
def _versions() -> dict[str, str]:
    return {
        "shardwise": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class _Chunk:
    """A part that this rank writes: of which tensor, which elements, and these."""

    key: str
    box: Box
    value: Tensor


@dataclass
class SaveJob:
    """A checkpoint that has been prepared. Once `take_copies` has been called, nothing reads the model again.

    Attributes:
        request: where it goes.
        mesh: the ranks.
        rank: this one's number in the mesh.
        content: "all", or "trained" where frozen parameters are left out.
        model_name: of the model's class.
        chunks: the parts that this rank writes.
        tensors: dtype and layout of the tensors that this rank reports, by key.
        optimizer: class name, and options and states by the parameters that this rank reports.
        tied: alias to canonical name.
        values: what is no tensor of the model or optimizer; rank 0's are written.
        companions: the contents of further files, by name.
        versions: of the libraries.
        fault: why this rank has no copies; `run` raises it on all of them.
    """

    request: SaveRequest
    mesh: Mesh
    rank: int
    content: Literal["all", "trained"]
    model_name: str
    chunks: list[_Chunk] = field(default_factory=list)
    tensors: dict[str, tuple[torch.dtype, Layout]] = field(default_factory=dict)
    optimizer: tuple[str, dict[str, Any]] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    companions: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    fault: Exception | None = None

    def add_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that this rank alone writes, as they are."""
        for key, value in tensors.items():
            shape = tuple(value.shape)
            self.tensors[key] = value.dtype, Layout(shape)
            if value.numel():
                self.chunks.append(_Chunk(key, full_box(shape), value))

    def add_shard(self, shard: LocalShard, division: Division, optimizer: OptimizerContent | None) -> None:
        """Adds this rank's portions of a tensor of the model, and of the optimizer's states of it."""
        first = division.first_writer(shard.name)
        is_reporter = first == self.rank or (first is None and not any(self.mesh.coords.values()))
        states = optimizer.described.get(shard.name) if optimizer is not None else None
        like = {model_key(shard.name): local_part(shard.value).detach()}
        for state, facts in (states or {}).items():
            key, tensor = (
                state_key(shard.name, state),
                optimizer.tensors.get((shard.name, state)) if optimizer else None,
            )
            if "like" in facts and tensor is not None:
                like[key] = tensor
            elif "whole" in facts and tensor is not None and is_reporter:
                self.add_tensors({key: tensor})
            elif "ranks" in facts and tensor is not None:
                self.add_tensors({f"{key}@{self.rank}": tensor})
        places = slices_of(shard.layout, self.mesh.coords, division.boxes_of(shard.name, self.rank))
        for key, value in like.items():
            if is_reporter:
                self.tensors[key] = value.dtype, shard.layout
            self.chunks += [_Chunk(key, box, value[place]) for box, place in places]
        if is_reporter and optimizer is not None and self.optimizer is not None and states is not None:
            self.optimizer[1][shard.name] = {"options": optimizer.options[shard.name], "states": states}

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
        for number, chunk in enumerate(self.chunks):
            buffer = buffers.get((chunk.key, chunk.box))
            if buffer is None or buffer.shape != chunk.value.shape or buffer.dtype != chunk.value.dtype:
                buffer = torch.empty(chunk.value.shape, dtype=chunk.value.dtype, device="cpu", pin_memory=pinned)
            buffer.copy_(chunk.value, non_blocking=pinned)
            kept[chunk.key, chunk.box] = buffer
            self.chunks[number] = _Chunk(chunk.key, chunk.box, buffer)
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

        Communicates: over `group`, three gathers of small objects, and one to rank 0 of what ranks have written.
        """
        staged: StagedDirectory | None = None
        groups = _deal(self.chunks, self.request.num_writers)
        with ExitStack() as stack:

            def open_directory() -> tuple[str | None, int]:
                nonlocal staged
                with as_load_error(self.request.root):
                    if self.fault is not None:
                        raise self.fault
                    if self.rank == 0:
                        stack.enter_context(writing(self.request.root))
                        staged = self._open()
                        stack.callback(staged.abort)
                return None if staged is None else str(staged.path), len(groups)

            opened = gather_from_all(group, "opening the checkpoint's directory", open_directory)
            place = Path(next(path for path, _ in opened if path))
            number = sum(num_files for _, num_files in opened[: 0 if group is None else group.rank()])
            with raise_on_all_ranks(group, "writing the checkpoint"), as_load_error(self.request.root):
                report = self._write(place, groups, number, spread)
            reports = gather_objects(report, group)

            def complete() -> str | None:
                with as_load_error(self.request.root):
                    return self._complete(staged, reports or []) if staged is not None else None

            tags = gather_from_all(group, "completing the checkpoint", complete)
            return next(tag for tag in tags if tag)

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

    def _write(
        self, directory: Path, groups: Sequence[list[_Chunk]], number: int, spread: Callable[..., list[Any]]
    ) -> RankReport:
        """Writes this rank's files, several at a time if that was asked for; on every rank.

        Args:
            number: of this rank's first file, over all ranks.
        """
        if not directory.is_dir():
            raise LoadError(
                f"rank {self.rank} does not see the checkpoint's directory",
                at=str(directory),
                why="rank 0 has made it, and every rank writes its part into it",
                fix="save to a directory that all machines share",
            )
        names = [f"rank-{self.rank:05d}" + f"-{each}" * (len(groups) > 1) for each in range(len(groups))]
        paths = [directory / f"{name}.safetensors" for name in names]
        written = spread(_write_file, list(zip(paths, range(number, number + len(groups)), groups, strict=True)))
        files = {path.name: facts for path, (facts, _) in zip(paths, written, strict=True)}
        parts: dict[str, list[str]] = {}
        for _, own in written:
            for key, text in own:
                parts.setdefault(key, []).append(text)
        sizes: dict[str, int] = {}
        for chunk in self.chunks:
            sizes[chunk.key] = sizes.get(chunk.key, 0) + chunk.value.numel()
        lines = "\n".join(f"{json.dumps(key)}\t{sizes[key]}\t{','.join(texts)}" for key, texts in parts.items())
        return RankReport(files, lines.encode(), self.tensors, self.optimizer[1] if self.optimizer is not None else {})

    def _complete(self, staged: StagedDirectory, reports: Sequence[RankReport]) -> str:
        """Completes the checkpoint when every rank has written; on rank 0."""
        request, directory = self.request, staged.path
        files = {name: facts for report in reports for name, facts in report.files.items()}
        class_name = self.optimizer[0] if self.optimizer is not None else None
        values = {"tied": self.tied, "optimizer": class_name and {"class": class_name}, "values": self.values}
        files[INDEX] = write_reported_index(directory, reports, values)
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


@dataclass(frozen=True)
class RankReport:
    """What a rank has written, for rank 0.

    Attributes:
        files: size and checksum of its files.
        parts: a line of text for each tensor: its key, the number of elements written, and its parts, as JSON.
        tensors: dtype and layout of the tensors that it reports.
        optimizer: options and states of the parameters that it reports.
    """

    files: dict[str, FileFacts]
    parts: bytes
    tensors: dict[str, tuple[torch.dtype, Layout]]
    optimizer: dict[str, Any]


def write_reported_index(directory: Path, reports: Sequence[RankReport], values: Mapping[str, Any]) -> FileFacts:
    """Writes the index of what the ranks have written, in the order of their files, once it is found complete.

    Args:
        values: `tied`, `optimizer` and `values` of the index; of the optimizer its class alone.

    Raises:
        RankError: the parts of a tensor do not have as many elements as the tensor.
    """
    tensors = {key: facts for report in reports for key, facts in report.tensors.items()}
    sizes: dict[str, int] = {}
    parts: dict[str, list[str]] = {}
    for report in reports:
        for line in report.parts.decode().splitlines():
            quoted, size, texts = line.split("\t")
            sizes[quoted] = sizes.get(quoted, 0) + int(size)
            parts.setdefault(quoted, []).append(texts)
    expected = {json.dumps(key): volume(full_box(layout.shape)) for key, (_, layout) in tensors.items()}
    if wrong := [key for key in {**expected, **sizes} if sizes.get(key, 0) != expected.get(key, -1)]:
        raise RankError(f"the ranks have not written {wrong[0]} once and completely", why="they hold it differently")
    states = {name: facts for report in reports for name, facts in report.optimizer.items()}
    optimizer = values["optimizer"] and {**values["optimizer"], **_grouped(states)}
    files = [name for report in reports for name in report.files]
    return write_index(directory, {**values, "files": files, "optimizer": optimizer}, tensors, parts)


def _write_file(file: tuple[Path, int, list[_Chunk]]) -> tuple[FileFacts, list[tuple[str, str]]]:
    """Writes a tensor file; returns its facts, and for each part its tensor's key and what the index says of it."""
    path, number, chunks = file
    ordered = sorted(chunks, key=lambda each: -each.value.dtype.itemsize)
    header = [(part_name(each.key, each.box), each.value.dtype, each.value.shape) for each in ordered]
    with TensorFileWriter(path, header) as out:
        parts = [(each.key, [number, out.write(each.value.cpu()), each.box]) for each in ordered]
    texts = [(key, json.dumps(part, separators=(",", ":"))) for key, part in parts]
    return FileFacts(out.num_bytes, out.header_crc), texts


def _deal(chunks: list[_Chunk], num_groups: int) -> list[list[_Chunk]]:
    """`chunks` in groups of about the same number of bytes; none of them empty."""
    groups: list[list[_Chunk]] = [[] for _ in range(num_groups)]
    sizes = [0] * num_groups
    for chunk in sorted(chunks, key=lambda each: -each.value.nbytes) if num_groups > 1 else chunks:
        number = sizes.index(min(sizes))
        sizes[number] += chunk.value.nbytes
        groups[number].append(chunk)
    return [group for group in groups if group]


def _grouped(states: Mapping[str, Any]) -> dict[str, Any]:
    """The options of parameters, each different set of them once."""
    groups: dict[str, int] = {}
    parameters = {
        name: {"group": groups.setdefault(json.dumps(facts["options"]), len(groups)), "states": facts["states"]}
        for name, facts in states.items()
    }
    return {"groups": [json.loads(group) for group in groups], "parameters": parameters}


@contextmanager
def as_load_error(root: Path) -> Iterator[None]:
    """Raises an error of the disk as one that names the checkpoint."""
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
