"""Saves: what each rank writes of a checkpoint, and the writing.

# [Note: how a checkpoint is made]
All ranks write into a hidden directory next to the tag's: each its own tensor file, with checksums, flushed to disk.
Rank 0 gathers their reports, and writes the index and, last, the manifest. Then the directory is renamed to the tag,
and `latest` names it. Old tags are deleted afterwards. A failure before the rename leaves only the hidden directory,
which is removed at once, or by the next save if the process was killed.
"""

import json
import logging
import platform
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from shardwise.checkpoint.collect import (
    LocalShard,
    OptimizerContent,
    SaveInputs,
    collect_inputs,
    model_key,
    slices_of,
    state_key,
)
from shardwise.checkpoint.manifest import INDEX, FileFacts, Manifest, part_name, write_index, write_manifest
from shardwise.checkpoint.store import LATEST, check_place, check_seen, clean, list_checkpoints, lock, prune
from shardwise.comm.agree import agree_on, all_reduce_int, raise_on_all_ranks
from shardwise.comm.collectives import Group, all_gather_objects, broadcast_object, gather_objects
from shardwise.errors import ConfigError, LoadError, as_error
from shardwise.mesh import Mesh
from shardwise.parameters.registry import Registry, local_part, registry_of, reshard, unchanged_names
from shardwise.parameters.replicas import check_replicas, replica_mismatch_word
from shardwise.runtime.adapter_facts import has_adapters
from shardwise.sharding.boxes import Box, full_box
from shardwise.sharding.division import Division, assign_writers
from shardwise.sharding.layout import Layout
from shardwise.versions import __version__
from shardwise.weights.staging import StagedDirectory, write_text
from shardwise.weights.write import TensorFileWriter

logger = logging.getLogger("shardwise.checkpoint")

_SAVING = threading.Lock()  # held while this process makes a checkpoint


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Destination of a checkpoint, and which older ones are deleted; the same on every rank.

    Attributes:
        tag: tag of the checkpoint; None: named by the step, or by its number.
        keep_last: number of the newest checkpoints to keep; None: all.
        keep_every: checkpoints whose step is a multiple of this are never deleted; None: any may be.
    """

    root: Path
    tag: str | None = None
    step: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    async_save: bool = False


@torch.no_grad()
def prepare_save(
    make_request: Callable[[], SaveRequest],
    *,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    loss_scale: Mapping[str, Any] | None,
    extra: Any,
    companions: Callable[[], Mapping[str, bytes]],
) -> "SaveJob":
    """Prepares a checkpoint with views of what is saved. All ranks call it.

    Args:
        make_request: returns the destination; its error is raised on every rank.
        companions: returns further files besides the model's configuration, on rank 0.

    Communicates: over all ranks, what `Agreement` does, an all-reduce of a number, and with adapters a gather of names.
    """
    registry = registry_of(model)
    mesh = registry.mesh
    reshard(model)
    options = {"scheduler": scheduler, "loss_scale": loss_scale, "extra": extra, "companions": companions}

    def collect() -> tuple[tuple[SaveRequest, SaveInputs], dict[str, str]]:
        request = make_request()
        inputs = collect_inputs(model, registry, optimizer=optimizer, **options)
        asked = {name: str(value) for name, value in vars(request).items()}
        return (request, inputs), {"the call": "save_checkpoint", **asked, **inputs.describe(registry)}

    request, inputs = agree_on(
        mesh.group(),
        collect,
        doing="save_checkpoint",
        what="ranks ask for different checkpoints",
        fix="pass the same on every rank; what belongs to a rank alone is not kept",
        error=ConfigError,
    )
    left_out = _names_left_out(model, registry, inputs)
    if all_reduce_int(replica_mismatch_word(inputs.copies(left_out)), mesh.group(), mesh.device):
        check_replicas(model, inputs.copies(left_out))
    division = _assign_writers(registry, inputs.shards, left_out)
    source = {"source": {"name": registry.source.name, "digest": registry.source.digest}} if left_out else {}
    job = SaveJob(
        request=request,
        mesh=mesh,
        content="trained" if left_out else "all",
        model_name=type(registry.model() or model).__name__,
        head={
            "tied": dict(registry.tied),
            "optimizers": {name: {"class": each.class_name} for name, each in inputs.optimizers.items()},
            "values": inputs.values | source,
        },
        companions=inputs.companions,
    )
    for name in division:
        if name in inputs.shards:
            job.add_shard(inputs.shards[name], division, inputs.optimizers)
    job.add_tensors(inputs.random)
    if mesh.position == 0:
        job.add_tensors(inputs.tensors)
    return job


def _names_left_out(model: nn.Module, registry: Registry, inputs: SaveInputs) -> set[str]:
    """Parameters that are not saved: frozen weights under adapters that are unchanged since they were read.

    Communicates: with adapters, one gather of names over all ranks.
    """
    if not has_adapters(model):
        return set()
    unchanged = unchanged_names(model, registry)
    kept = {
        name
        for name, each in inputs.shards.items()
        if each.value.requires_grad
        or name not in unchanged
        or any(content.described.get(name) for content in inputs.optimizers.values())
    }
    return registry.entries.keys() - set().union(*all_gather_objects(kept, registry.mesh.group()))


def _assign_writers(registry: Registry, shards: Mapping[str, LocalShard], left_out: set[str]) -> Division:
    """Returns the assignment of parameters and buffers to writing ranks; the same on every rank."""
    shape, pipeline = registry.mesh.shape, registry.plan.pipeline
    layouts = {name: entry.layout for name, entry in registry.entries.items() if name not in left_out}
    holders: dict[str, list[int]] = {}
    for name, shard in shards.items():
        if name in registry.entries:
            continue
        layouts[name] = shard.layout
        if not isinstance(shard.value, nn.Parameter):  # of a buffer the first rank's: others may have counted more
            stage = pipeline.coord_computing(name) if pipeline is not None else 0  # the one whose forward counts
            holders[name] = [next(rank for rank in range(shape.world_size) if shape.coords(rank)["pp"] == stage)]
    return assign_writers(layouts, shape, holders=holders)


@dataclass(frozen=True)
class _Chunk:
    """Elements `box` of a tensor that this rank writes."""

    key: str
    box: Box
    value: Tensor


@dataclass
class RankReport:
    """Report of a rank's writing, for rank 0.

    Attributes:
        files: size and checksum of its file, by name; empty if it writes nothing.
        parts: checksum and box of its parts as JSON, `CRC,[[start,stop],…]`, by key.
        tensors: dtype and layout of the tensors that it reports, by key.
        optimizers: options and states of the parameters that it reports, by optimizer.
    """

    files: dict[str, FileFacts] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[str, tuple[torch.dtype, Layout]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(kw_only=True)
class SaveJob:
    """A prepared checkpoint. After `take_copies` nothing reads the model.

    Attributes:
        content: "all", or "trained" if frozen parameters are left out.
        head: `tied`, `optimizers` and `values` of the index; of the optimizers only their classes.
        companions: on rank 0, contents of further files, by name.
        add_files: writes further files into the unfinished checkpoint; all ranks call it.
    """

    request: SaveRequest
    mesh: Mesh
    content: Literal["all", "trained"]
    model_name: str
    head: Mapping[str, Any]
    companions: Mapping[str, bytes]
    chunks: list[_Chunk] = field(default_factory=list)
    report: RankReport = field(default_factory=RankReport)
    add_files: Callable[[Path], None] | None = None

    def add_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that only this rank writes, unchanged."""
        for key, value in tensors.items():
            shape = tuple(value.shape)
            self.report.tensors[key] = value.dtype, Layout(shape)
            if value.numel():
                self.chunks.append(_Chunk(key, full_box(shape), value))

    def add_shard(self, shard: LocalShard, division: Division, optimizers: Mapping[str, OptimizerContent]) -> None:
        """Adds this rank's parts of a model tensor and of its optimizer states."""
        rank = self.mesh.position
        is_reporter = division.first_writer(shard.name) in (rank, None)
        like = {model_key(shard.name): local_part(shard.value).detach()}
        for name, optimizer in optimizers.items():
            states = optimizer.described.get(shard.name)
            if states is not None and is_reporter:
                reported = self.report.optimizers.setdefault(name, {})
                reported[shard.name] = {"options": optimizer.options[shard.name], "states": states}
            for state, facts in (states or {}).items():
                key, tensor = state_key(shard.name, state, name), optimizer.tensors.get((shard.name, state))
                if tensor is None:
                    continue
                if "like" in facts:  # split like the parameter
                    like[key] = tensor
                elif "ranks" in facts:
                    self.add_tensors({f"{key}@{rank}": tensor})
                elif is_reporter:
                    self.add_tensors({key: tensor})
        boxes = slices_of(shard.layout, self.mesh.coords, division.boxes_of(shard.name, rank))
        for key, value in like.items():
            if is_reporter:
                self.report.tensors[key] = value.dtype, shard.layout
            self.chunks += [_Chunk(key, box, value[place]) for box, place in boxes]

    def take_copies(self) -> None:
        """Copies everything to host memory; from GPUs to pinned memory, which torch reuses."""
        self.chunks = [
            _Chunk(each.key, each.box, each.value.to("cpu", non_blocking=True, copy=True)) for each in self.chunks
        ]
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    def run(self, group: Group | None) -> str:
        """Writes the checkpoint; returns its tag. All ranks of `group` call it.

        Communicates: over `group`, three gathers of small objects, one broadcast of a path, one gather of reports.
        """
        root, staged = self.request.root, None
        with ExitStack() as stack:
            with raise_on_all_ranks(group, "opening the checkpoint's directory"), as_load_error(root):
                if self.mesh.position == 0:
                    stack.enter_context(_SAVING)
                    staged = self._open()
                    stack.callback(staged.abort)
            place, tag = broadcast_object(staged and (str(staged.path), staged.target.name), group)
            with raise_on_all_ranks(group, "writing the checkpoint"), as_load_error(root):
                self._write(Path(place))
            if self.add_files is not None:
                self.add_files(Path(place))
            reports = gather_objects(self.report, group)
            with raise_on_all_ranks(group, "completing the checkpoint"), as_load_error(root):
                if staged is not None and reports is not None:
                    self._complete(staged, reports)
        return str(tag)

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

    def _write(self, directory: Path) -> None:
        """Writes this rank's file."""
        rank, report = self.mesh.position, self.report
        check_seen(directory, rank=rank)
        if not self.chunks:
            return
        path = directory / f"rank-{rank:05d}.safetensors"
        ordered = sorted(self.chunks, key=lambda each: -each.value.dtype.itemsize)
        header = [(part_name(each.key, each.box), each.value.dtype, each.value.shape) for each in ordered]
        with TensorFileWriter(path, header) as out:
            for each in ordered:
                text = f"{out.write(each.value.cpu())},{json.dumps(each.box, separators=(',', ':'))}"
                report.parts.setdefault(each.key, []).append(text)
        report.files[path.name] = FileFacts(out.num_bytes, out.header_crc)

    def _complete(self, staged: StagedDirectory, reports: Sequence[RankReport]) -> None:
        """Completes the checkpoint on rank 0, after every rank has written."""
        request, directory = self.request, staged.path
        files = {name: facts for report in reports for name, facts in report.files.items()}
        files[INDEX] = write_reported_index(directory, reports, self.head)
        for name, content in self.companions.items():
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
            versions={
                "shardwise": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            files=files,
        )
        write_manifest(directory, manifest)
        staged.commit()
        try:
            write_text(request.root / LATEST, f"{manifest.tag}\n")
        except OSError as error:  # it decides nothing: a full disk, which deleting older ones may make room on
            logger.warning("%s is complete, and %s could not be written: %s", staged.target, LATEST, error)
        if request.keep_last is not None:
            prune(request.root, keep_last=request.keep_last, keep_every=request.keep_every)


def write_reported_index(directory: Path, reports: Sequence[RankReport], head: Mapping[str, Any]) -> FileFacts:
    """Writes the index from the ranks' reports, in the order of their files.

    Args:
        head: `tied`, `optimizers` and `values` of the index; of the optimizers only their classes.
    """
    parts: dict[str, list[str]] = {}
    writing = [report for report in reports if report.files]
    for number, report in enumerate(writing):
        for key, texts in report.parts.items():
            parts.setdefault(key, []).extend(f"[{number},{text}]" for text in texts)
    tensors = {key: facts for report in reports for key, facts in report.tensors.items()}
    optimizers = {}
    for optimizer, facts in head["optimizers"].items():
        groups: dict[str, int] = {}  # each different set of options once
        parameters = {
            name: {"group": groups.setdefault(json.dumps(each["options"]), len(groups)), "states": each["states"]}
            for report in reports
            for name, each in report.optimizers.get(optimizer, {}).items()
        }
        optimizers[optimizer] = {**facts, "groups": [json.loads(each) for each in groups], "parameters": parameters}
    states = {"optimizer": optimizers.pop("", None)} | ({"optimizers": optimizers} if optimizers else {})
    files = [name for report in writing for name in report.files]
    head = {"files": files, "tied": head["tied"], **states, "values": head["values"]}
    return write_index(directory, head, tensors, parts)


def as_load_error(root: Path) -> AbstractContextManager[None]:
    """Context manager: converts a disk error to a `LoadError` that names the checkpoint."""
    fix = "make room, or save to another directory; checkpoints that were complete still are"
    return as_error(LoadError, "the checkpoint cannot be written", OSError, at=str(root), fix=fix)
