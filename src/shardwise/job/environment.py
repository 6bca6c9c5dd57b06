"""The environment of ranks: tasks of Slurm as ranks (`srun -n 8 shardwise train run.yaml`), and defaults on GPUs."""

import os
import re
from collections.abc import MutableMapping

from shardwise.errors import MeshError

_FIRST_PORT, _NUM_PORTS = 12_000, 20_000  # below the ports that systems use for outgoing connections


def read_slurm_environment() -> None:
    """Sets torchrun's variables, unless they are set, if this process is one of several tasks of a Slurm step.

    A batch script and an interactive shell are not tasks, whatever `SLURM_NTASKS` says: they start ranks.
    """
    environment = os.environ
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "WORLD_SIZE" in environment or num_tasks == "1":
        return
    try:
        counts: list[int] = []
        for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):  # `8(x2),4` means 8, 8 and 4
            count, _, times = part.rstrip(")").partition("(x")
            counts += [int(count)] * int(times or 1)
        # The same port on all ranks of a step, and another one for each step of a machine.
        step = environment.get("SLURM_STEP_ID", "0")
        number = int(environment["SLURM_JOB_ID"]) * 31 + (int(step) if step.isdigit() else 0)
        variables = {
            "WORLD_SIZE": num_tasks,
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(counts[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_FIRST_PORT + number % _NUM_PORTS),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise MeshError(
            f"this is one of {num_tasks} tasks of a Slurm step, but its environment is incomplete",
            why=f"a variable is missing or invalid: {error}",
            fix="start it with srun, or with torchrun",
        ) from None
    for name, value in variables.items():
        environment.setdefault(name, value)


def first_host(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation: `gpu[03-05,9],login` begins with `gpu03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"no host in {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


GPU_DEFAULTS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # less fragmentation by rows of many lengths
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does: ends a collective that hangs
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # for `torchfrtrace`
    "TORCH_FR_BUFFER_SIZE": "2000",  # collectives in this flight recorder
}


def set_gpu_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that are not set. Call it before torch allocates anything; on CPUs they have no effect."""
    for name, value in GPU_DEFAULTS.items():
        if name != "PYTORCH_ALLOC_CONF" or "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # its older name
            environment.setdefault(name, value)
