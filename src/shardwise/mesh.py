"""`Mesh`: a `MeshShape` bound to real processes and one device per process; passed explicitly, never global.

# [Note: the last collective]
A collective is over for us when its result is there; gloo's thread lets go of the tensors a moment later, and takes the
interpreter's lock to do so. Up to Python 3.13 a thread that asks for the lock while the interpreter goes away is ended
on the spot, which C++ answers by aborting the process: about one run in forty that finished within that moment ended
with SIGABRT. So a process that used gloo rests briefly before it ends, while threads can still have the lock.

# [Note: gloo's loop spins]
A gloo group has a thread that waits for its sockets. When a socket is ready while another thread holds the lock of its
connection, it asks again at once, and again. Where there are as many ranks as cores, the holder of the lock often waits
for that very core, until the kernel takes it from the spinning thread at its next tick: a collective of a few kilobytes
among four ranks on two cores took 7 ms, most of it spent in the kernel. As a batch thread of lower priority it does not
push the holder from the core that is about to let go of the lock, and yields the core when the holder wants it: 2.7 ms,
at less than half the processor time.
"""

from __future__ import annotations

import atexit
import datetime
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from shardwise.errors import MeshError
from shardwise.topology.axes import AXES, DATA_AXES
from shardwise.topology.shape import MeshShape

__all__ = ["Mesh"]

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SECONDS_TO_LET_GO = 0.1
_GLOO_LOOP = "gloo_tcp_loop"
_LOOP_NICENESS = 5


class Mesh:
    """The ranks of one job, arranged by a layout.

    Open it with `Mesh.open`; several meshes over the same processes may coexist. A layout of one rank needs no
    launcher and starts no process group.

    Attributes:
        shape: sizes of every axis (`MeshShape`).
        rank: this process's global rank.
        device: the device this rank computes on.
    """

    def __init__(self, shape: MeshShape, *, rank: int, device: torch.device, owns_processes: bool) -> None:
        self.shape = shape
        self.rank = rank
        self.device = device
        self._owns_processes = owns_processes
        self._coords = shape.coords(rank)
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
        self._device_mesh: dist.DeviceMesh | None = None
        for axes in (*((axis,) for axis in AXES), DATA_AXES):
            if math.prod(shape.size(axis) for axis in axes) > 1:
                self._open_group(shape.groups(*axes))

    @classmethod
    def open(
        cls,
        layout: str | MeshShape,
        *,
        device: str | torch.device | None = None,
        backend: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> Mesh:
        """Opens the mesh for `layout`, reading the environment that torchrun sets (`RANK`, `WORLD_SIZE`, …).

        Args:
            layout: `"fsdp2.tp4"` or a `MeshShape`; its product must equal the number of processes.
            device: device of this rank; by default this rank's GPU where there is one per local rank, else the CPU.
            backend: torch.distributed backend; by default `nccl` on GPUs and `gloo` on CPUs.
            timeout_seconds: after how long a collective that some rank never joins fails.

        Raises:
            MeshError: the text is no layout, or the world has another size than the layout.

        Communicates: the rendezvous, and the creation of one process group for each axis larger than 1.
        """
        if not isinstance(layout, str | MeshShape):
            raise MeshError(
                f"a layout cannot be a {type(layout).__name__}", fix='use text such as "fsdp2.tp4", or a MeshShape'
            )
        shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
        started = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
        if shape.world_size > 1 and world_size == 1 and not started and "WORLD_SIZE" not in os.environ:
            raise MeshError(
                f"layout {shape} needs {shape.world_size} processes, this is a single one",
                why="no launcher set RANK and WORLD_SIZE in the environment",
                fix=f"start it with: torchrun --nproc-per-node {shape.world_size} SCRIPT, or use layout tp1",
            )
        shape.check_world_size(world_size)
        bound = _pick_device(device)
        if world_size > 1 and not started:
            _start_processes(bound, backend, timeout_seconds)
        rank = dist.get_rank() if world_size > 1 else 0
        return cls(shape, rank=rank, device=bound, owns_processes=world_size > 1 and not started)

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return self.shape.size(axis)

    def coord(self, axis: str) -> int:
        """This rank's position along `axis`."""
        self.shape.size(axis)
        return self._coords[axis]

    @property
    def coords(self) -> dict[str, int]:
        """This rank's position on every axis."""
        return dict(self._coords)

    @property
    def data_size(self) -> int:
        """Number of distinct batches: ddp x fsdp."""
        return self.shape.data_size

    @property
    def data_rank(self) -> int:
        """Which of the distinct batches this rank reads; ranks that differ only in tp, cp or pp read the same."""
        return self.shape.data_rank(self.rank)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group of this rank along `axes`: one axis, the data axes `ddp` and `fsdp`, or, without any, all.

        None where they have one rank.
        """
        if not axes:
            return dist.group.WORLD if self.shape.world_size > 1 else None
        ranks = self.shape.groups(*axes)
        return self._groups[ranks] if len(ranks[0]) > 1 else None

    def subgroup(self, axis: str, blocks: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """The group of this rank when the coords of `axis` are divided into `blocks`, e.g. `((0, 1), (2, 3))`.

        Every rank of the mesh must ask for the same blocks in the same order: the first call creates the groups.
        Returns None where this rank's block has one member.
        """
        ranks = tuple(
            tuple(line[coord] for coord in block) for line in self.shape.groups(axis) for block in blocks if block
        )
        group = self._open_group(ranks)
        return group if group is not None and dist.get_world_size(group) > 1 else None

    @property
    def device_mesh(self) -> dist.DeviceMesh:
        """The torch `DeviceMesh` of the axes larger than 1 (of `tp` alone where there is none), outermost first."""
        if self._device_mesh is None:
            axes = [axis for axis in AXES if self.shape.size(axis) > 1] or ["tp"]
            ranks = torch.arange(self.shape.world_size).view([self.shape.size(axis) for axis in axes])
            self._device_mesh = dist.DeviceMesh(self.device.type, ranks, mesh_dim_names=tuple(axes))
        return self._device_mesh

    @property
    def data_mesh(self) -> dist.DeviceMesh | None:
        """The `DeviceMesh` of the data axes larger than 1, `ddp` before `fsdp`; None where there is none."""
        axes = tuple(axis for axis in DATA_AXES if self.shape.size(axis) > 1)
        return self.device_mesh[axes] if axes else None

    @property
    def tensor_mesh(self) -> dist.DeviceMesh | None:
        """The one-dimensional `DeviceMesh` of the tp axis; None where tp has one rank."""
        return self.device_mesh["tp"] if self.shape.size("tp") > 1 else None

    def _open_group(self, ranks: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        if self.shape.world_size == 1:
            return None
        if ranks not in self._groups:
            group, _ = dist.new_subgroups_by_enumeration([list(line) for line in ranks])
            self._groups[ranks] = group
            _calm_gloo_loops()
        return self._groups[ranks]

    def close(self) -> None:
        """Lets go of the groups. Safe to call twice.

        What `open` started stays for the next mesh of the job and ends with the process: torch cannot meet a second
        time through one launcher's store.
        """
        self._groups.clear()
        self._device_mesh = None

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None and self._owns_processes:
            _end_processes()  # others may wait for this rank in a collective: now they hear of it

    def __repr__(self) -> str:
        return f"Mesh({self.shape}, rank {self.rank} of {self.shape.world_size}, {self.device})"


def _pick_device(device: str | torch.device | None) -> torch.device:
    """This rank's device, made current where it is a GPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if 0 < available < local_world:
            raise MeshError(
                f"{local_world} ranks on this machine but {available} GPU(s)",
                why="each rank takes one GPU",
                fix=f'start at most {available} ranks here, or pass Mesh.open(..., device="cpu")',
            )
        device = f"cuda:{local_rank}" if available else "cpu"
    picked = torch.device(device)
    if picked.type == "cuda":
        picked = torch.device("cuda", local_rank if picked.index is None else picked.index)
        torch.cuda.set_device(picked)
    return picked


def _start_processes(device: torch.device, backend: str | None, timeout_seconds: float) -> None:
    missing = [name for name in _LAUNCH_VARIABLES if name not in os.environ]
    if missing:
        raise MeshError(
            f"the environment lacks {', '.join(missing)}",
            why="WORLD_SIZE says there are several processes, but not how they find each other",
            fix="start the script with torchrun, which sets all of them",
        )
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" and backend in (None, "nccl") else None,
    )
    _calm_gloo_loops()
    atexit.register(_end_processes)


def _calm_gloo_loops() -> None:
    """Has this process's gloo threads give way where ranks take every core: [Note: gloo's loop spins]."""
    if sys.platform != "linux" or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < len(os.sched_getaffinity(0)):
        return
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        try:
            if (task / "comm").read_text().strip() == _GLOO_LOOP and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, thread, _LOOP_NICENESS)
        except OSError:  # the thread has ended meanwhile, or the sandbox forbids it: slower is all it is
            continue


def _end_processes() -> None:
    """Runs while Python still works, when the process ends."""
    if dist.is_initialized():
        uses_gloo = "gloo" in dist.get_backend()
        dist.destroy_process_group()
        if uses_gloo:
            time.sleep(_SECONDS_TO_LET_GO)  # [Note: the last collective]
