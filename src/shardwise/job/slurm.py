"""Tasks of Slurm as ranks: `srun -n 8 shardwise train run.yaml` is one job of eight ranks, not eight jobs.

What reads the environment reads the variables that torchrun sets. Where srun started this process and no torchrun did,
they are set here from Slurm's.
"""

from __future__ import annotations

import os
import re

from shardwise.errors import MeshError

__all__ = ["read_slurm_environment"]

_FIRST_PORT, _NUM_PORTS = 12_000, 20_000
"""Below the ports that systems hand out by themselves."""


def read_slurm_environment() -> None:
    """Sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` as torchrun would,
    where this process is one of several tasks of a Slurm step; what is set already stays.

    A batch script and an interactive shell are no tasks, whatever `SLURM_NTASKS` says: they start ranks.

    Raises:
        MeshError: Slurm's variables contradict each other.
    """
    environment = os.environ
    if "WORLD_SIZE" in environment or not environment.get("SLURM_STEP_NUM_TASKS", "1").isdigit():
        return
    num_tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if num_tasks == 1:
        return
    try:
        said = {
            "WORLD_SIZE": str(num_tasks),
            "RANK": str(int(environment["SLURM_PROCID"])),
            "LOCAL_RANK": str(int(environment["SLURM_LOCALID"])),
            "LOCAL_WORLD_SIZE": str(_tasks_by_node(environment)[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_port(environment)),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise MeshError(
            f"this is one of {num_tasks} tasks of a Slurm step, but not which",
            why=f"SLURM_STEP_NUM_TASKS is {num_tasks}, and another of its variables is missing or wrong: {error}",
            fix="start it with srun, or with torchrun",
        ) from None
    for name, value in said.items():
        environment.setdefault(name, value)


def first_host(nodes: str) -> str:
    """The first host of a list as Slurm writes it: `gpu[03-05,9],login` begins with `gpu03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"no host in {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _tasks_by_node(environment: os._Environ[str]) -> list[int]:
    """`8(x2),4` means 8, 8 and 4."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def _port(environment: os._Environ[str]) -> int:
    """The same on all ranks of a step, and another one for each step of a machine."""
    step = environment.get("SLURM_STEP_ID", "0")
    number = int(environment["SLURM_JOB_ID"]) * 31 + (int(step) if step.isdigit() else 0)
    return _FIRST_PORT + number % _NUM_PORTS
