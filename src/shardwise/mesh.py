"""`Mesh`: a `MeshShape` on real processes, one device each. It is passed explicitly and never global."""

import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist

from shardwise.errors import MeshError
from shardwise.failure import leave_errors_to_launcher, record
from shardwise.job.environment import read_slurm_environment
from shardwise.job.groups import Groups, make_groups, new_group, ranks_along, read_device_mesh, read_groups, wide_axes
from shardwise.job.processes import current_heartbeat, end_processes, pick_device, start_processes
from shardwise.job.rendezvous import read_world_size
from shardwise.topology.shape import AXES, FSDP_AXES, MeshShape

Blocks = tuple[tuple[int, ...], ...]


class Mesh:
    """The ranks of one job, arranged by a layout.

    `Mesh.open` opens it; `Mesh.adopt` makes one over groups that another library opened. Several meshes over the same
    processes may coexist. A layout of one rank needs no launcher and starts no process group.

    Args:
        ranks: global ranks that fill the shape, tp innermost; default: in order.
        groups: this rank's process groups, by their axes of several ranks.
        timeout: timeout of the groups that `subgroup` creates.
        owns_processes: whether the processes end if an error leaves the mesh.

    Attributes:
        shape: sizes of every axis (`MeshShape`).
        rank: this process's global rank.
        device: the device of this rank.
        device_mesh: torch `DeviceMesh` of the axes of several ranks, outermost first; None if the mesh has one rank.
        data_mesh: `DeviceMesh` of the data axes of several ranks, `ddp` before `fsdp`; None if there is none.
        tensor_mesh: `DeviceMesh` of the tp axis; None if tp has one rank.
    """

    device_mesh: dist.DeviceMesh | None = None
    data_mesh: dist.DeviceMesh | None = None
    tensor_mesh: dist.DeviceMesh | None = None

    def __init__(
        self,
        shape: MeshShape,
        *,
        rank: int,
        device: torch.device,
        ranks: Sequence[int] | None = None,
        groups: Groups | None = None,
        timeout: datetime.timedelta = datetime.timedelta(seconds=600),
        owns_processes: bool = False,
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.device = device
        self._ranks = range(shape.world_size) if ranks is None else ranks
        self._coords = shape.coords(self._ranks.index(rank))
        self._groups: Groups = {} if groups is None else groups
        self._subgroups: dict[tuple[str, Blocks], dist.ProcessGroup | None] = {}
        self._timeout = timeout
        self._owns_processes = owns_processes
        self._heartbeat = current_heartbeat()

    @classmethod
    def open(
        cls,
        layout: str | MeshShape,
        *,
        device: str | torch.device | None = None,
        backend: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> "Mesh":
        """Opens the mesh for `layout`. Reads the environment that torchrun (`RANK`, `WORLD_SIZE`, …) or srun sets.

        Args:
            layout: `"fsdp2.tp4"` or a `MeshShape`; its product must equal the number of processes.
            device: device of this rank. Default: `SHARDWISE_DEVICE`, else a GPU if there is any (of several, that of
                the local rank), else the CPU.
            backend: torch.distributed backend. Default: `nccl` on GPUs and `gloo` on CPUs. For trials, several ranks
                may share a card over `gloo`.
            timeout_seconds: timeout of collectives.

        Raises:
            MeshError: the layout is invalid, the world has another size, the environment holds impossible numbers, or a
                rank did not come in time or has no own device.

        Communicates: the rendezvous, and the creation of one process group per axis larger than 1.
        """
        leave_errors_to_launcher()
        if not isinstance(layout, str | MeshShape):
            raise MeshError(
                f"a layout cannot be a {type(layout).__name__}", fix='use text such as "fsdp2.tp4", or a MeshShape'
            )
        if not 0 < timeout_seconds < 10**9:
            raise MeshError(f"timeout_seconds is {timeout_seconds}", fix="use a positive number of seconds")
        shape = layout if isinstance(layout, MeshShape) else MeshShape.parse(layout)
        read_slurm_environment()
        started = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if started else read_world_size()
        if shape.world_size > 1 and world_size == 1 and not started and "WORLD_SIZE" not in os.environ:
            raise MeshError(
                f"layout {shape} needs {shape.world_size} processes, this is a single one",
                why="no launcher set RANK and WORLD_SIZE in the environment",
                fix=f"start it with: torchrun --nproc-per-node {shape.world_size} SCRIPT, or use layout tp1",
            )
        shape.check_world_size(world_size)
        picked = pick_device(device)
        timeout = datetime.timedelta(seconds=timeout_seconds)
        if world_size > 1 and not started:
            start_processes(picked, backend, timeout)
        owns_processes = world_size > 1 and not started
        return cls._over(shape, range(world_size), picked, timeout=timeout, owns_processes=owns_processes)

    @classmethod
    def adopt(
        cls,
        source: dist.DeviceMesh | Mapping[str, dist.ProcessGroup],
        *,
        axes: Mapping[str, str] | None = None,
        device: str | torch.device | None = None,
        timeout_seconds: float = 600.0,
    ) -> "Mesh":
        """Returns a mesh over the groups of a `DeviceMesh`, or over process groups, that somebody else opened.

        Args:
            source: a `DeviceMesh` over all ranks of the job, or this rank's process group for each axis by name.
            axes: maps their names to our axes, if they differ: `{"dp_shard": "fsdp"}`. Not needed for dims of one rank.
            device: see `open`; default: of the device mesh's type.
            timeout_seconds: timeout of the groups that are still created.

        Raises:
            MeshError: a name is no axis, or the ranks are not all those of the job in ascending order.

        Communicates: with process groups, a gather of their ranks; if `ddp` and `fsdp` both have several ranks, the
        creation of a group of both.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise MeshError("there is no process group to take over", fix="use Mesh.open, which starts them")
        if isinstance(source, dist.DeviceMesh):
            shape, ranks, groups = read_device_mesh(source, axes or {})
            if device is None:
                is_cuda = source.device_type == "cuda"
                device = f"cuda:{torch.cuda.current_device()}" if is_cuda else source.device_type
        else:
            shape, ranks, groups = read_groups(source, axes or {})
        timeout = datetime.timedelta(seconds=timeout_seconds)
        return cls._over(shape, ranks, pick_device(device), existing=groups, timeout=timeout)

    @classmethod
    def _over(
        cls,
        shape: MeshShape,
        ranks: Sequence[int],
        device: torch.device,
        *,
        existing: Groups | None = None,
        timeout: datetime.timedelta,
        owns_processes: bool = False,
    ) -> "Mesh":
        """Returns the mesh over an initialized process group, with every group it needs."""
        rank = dist.get_rank() if shape.world_size > 1 else 0
        groups = make_groups(shape, ranks, existing=existing or {}, timeout=timeout)
        mesh = cls(
            shape, rank=rank, device=device, ranks=ranks, groups=groups, timeout=timeout, owns_processes=owns_processes
        )
        names = wide_axes(shape)
        if names:
            sizes = [shape.size(name) for name in names]
            mesh.device_mesh = dist.DeviceMesh.from_group(
                [groups[name,] for name in names],
                device.type,
                torch.tensor(ranks, device="cpu").view(sizes),
                mesh_dim_names=names,
            )
            data_names = wide_axes(shape, FSDP_AXES)
            mesh.data_mesh = mesh.device_mesh[data_names] if data_names else None
            mesh.tensor_mesh = mesh.device_mesh["tp"] if shape.size("tp") > 1 else None
        return mesh

    def size(self, axis: str) -> int:
        """Returns the number of ranks along `axis`."""
        return self.shape.size(axis)

    def coord(self, axis: str) -> int:
        """Returns this rank's coordinate along `axis`."""
        self.shape.size(axis)
        return self._coords[axis]

    @property
    def position(self) -> int:
        """This rank's number in the mesh, from 0; the argument of `shape.coords`."""
        return self.shape.rank(**self._coords)

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinates on every axis."""
        return dict(self._coords)

    @property
    def timeout(self) -> datetime.timedelta:
        """Timeout of collectives."""
        return self._timeout

    @property
    def data_size(self) -> int:
        """Number of distinct batches: ddp x fsdp."""
        return self.shape.data_size

    @property
    def data_rank(self) -> int:
        """Index of the batch that this rank reads. Ranks that differ only in tp, cp or pp read the same."""
        return self.shape.data_rank(self._ranks.index(self.rank))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Returns this rank's process group along `axes`: one axis, the data axes `ddp` and `fsdp`, the axes along
        which ranks read the same rows, or, without arguments, all. None if the group has one rank.
        """
        wide = wide_axes(self.shape, axes or AXES)
        return self._groups[wide] if wide else None

    def subgroup(self, axis: str, blocks: Blocks) -> dist.ProcessGroup | None:
        """Returns this rank's group when the coords of `axis` are divided into `blocks`, such as `((0, 1), (2, 3))`.

        Every rank of the mesh must ask for the same blocks in the same order: the first call creates the groups, unless
        they are the axis's own. Returns None if this rank's block has one member.
        """
        if len(blocks) == 1 and len(blocks[0]) == self.size(axis):
            return self.group(axis)
        if (axis, blocks) not in self._subgroups:
            lines = ranks_along(self.shape, self._ranks, [axis])
            group = new_group(
                [[line[coord] for coord in block] for line in lines for block in blocks], timeout=self._timeout
            )
            self._subgroups[axis, blocks] = group if group is not None and group.size() > 1 else None
        return self._subgroups[axis, blocks]

    def new_group(self, axis: str) -> dist.ProcessGroup | None:
        """Returns a new group of the ranks of `group(axis)`, owned by the caller. Every rank of the mesh calls this."""
        if self.size(axis) == 1:
            return None
        return new_group(ranks_along(self.shape, self._ranks, [axis]), timeout=self._timeout)

    @contextmanager
    def represented(self, stand_in: Callable[[dist.ProcessGroup], dist.ProcessGroup]) -> Iterator[None]:
        """Context manager: `group` returns `stand_in(group)`."""
        groups = self._groups
        self._groups = {axes: stand_in(group) for axes, group in groups.items()}
        try:
            yield
        finally:
            self._groups = groups

    def note_step(self) -> None:
        """Records that this rank begins another training step, for messages about missing ranks."""
        if self._heartbeat is not None:
            self._heartbeat.step += 1

    def take_over(self) -> None:
        """Makes an error that leaves this mesh end the job, like an error that leaves the mesh that started it."""
        self._owns_processes = self._heartbeat is not None

    def close(self) -> None:
        """Releases the groups. Safe to call twice.

        The process group that `open` started stays for the next mesh of the job and ends with the process: torch cannot
        initialize twice through one launcher's store.
        """
        self._groups.clear()
        self._subgroups.clear()
        self.device_mesh = self.data_mesh = self.tensor_mesh = None

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        heartbeat = self._heartbeat if self._owns_processes else None
        explained = heartbeat.explain(error) if error is not None and heartbeat is not None else None
        if heartbeat is not None:
            heartbeat.note_end(explained or error)
        self.close()
        if isinstance(error, Exception) and self._owns_processes:
            record(explained or error)
        if error is not None and self._owns_processes:
            end_processes(explained or error)  # others may wait for this rank in a collective: now they hear of it
        if explained is not None:
            raise explained from error

    def __repr__(self) -> str:
        return f"Mesh({self.shape}, rank {self.rank} of {self.shape.world_size}, {self.device})"
