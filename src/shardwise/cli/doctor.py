"""`shardwise doctor`: is this machine ready?"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from shardwise.versions import SUPPORTED, installed

HELP = """\
Check this machine: versions (installed, oldest supported, newest tested), devices, communication backends, threads, the
hub cache, what torch.compile needs, and an all-reduce between two CPU ranks. The exit code is 1 if something is broken.

  shardwise doctor
"""

OPTIONAL = {"datasets": "data.dataset", "tensorboard": "log.tensorboard", "peft": "adapters"}
SECONDS_FOR_ALL_REDUCE = 120
LOW_SPACE_BYTES = 5 * 2**30

Finding = tuple[str, str, str]  # `ok`, `note` or `broken`; what was checked; the result, and what to do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: `shardwise doctor` has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    num_broken = 0
    for check in (_check_packages, _check_machine, _check_all_reduce):
        for state, topic, text in check():
            num_broken += state == "broken"
            print(f"{state:<7} {topic:<18} {text}", flush=True)
    print("\nthis machine is ready" if num_broken == 0 else f"\n{num_broken} broken")
    return 1 if num_broken else 0


def _check_packages() -> Iterator[Finding]:
    yield "ok", "python", f"{platform.python_version()}, {platform.platform()}"
    try:
        needed = importlib.metadata.requires("shardwise") or []
        yield "ok", "shardwise", importlib.metadata.version("shardwise")
    except importlib.metadata.PackageNotFoundError:
        needed = ["torch", "transformers"]
        yield "note", "shardwise", "not installed, runs from its sources"
    for requirement in map(Requirement, needed):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            version, support = installed(requirement.name), SUPPORTED.get(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                yield "broken", requirement.name, f"{version or 'not installed'}; pip install -U '{requirement}'"
            elif support is None:
                yield "ok", requirement.name, version
            else:
                state = "note" if support.is_newer(version) else "ok"
                yield state, requirement.name, f"{version}; oldest {support.oldest}, tested to {support.tested}"
    for name, use in OPTIONAL.items():
        version = installed(name)
        yield "ok" if version else "note", name, version or f"not installed; only needed for {use}"


def _check_machine() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist
    from huggingface_hub import constants

    has_gpu = torch.cuda.is_available()
    for index in range(torch.cuda.device_count() if has_gpu else 0):
        properties = torch.cuda.get_device_properties(index)
        yield "ok", f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if has_gpu:
        yield "ok", "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    else:
        yield "note", "devices", "no GPU; ranks run on the CPU"
    for backend in ("gloo", "nccl") if has_gpu else ("gloo",):
        is_there = dist.is_available() and dist.is_backend_available(backend)
        yield ("ok", backend, "available") if is_there else ("broken", backend, "missing from this build of torch")

    cores, asked = os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS", "")
    origin = f"OMP_NUM_THREADS={asked}" if asked else "shardwise train divides the cores among its ranks"
    yield "ok", "threads", f"{cores} cores, torch uses {torch.get_num_threads()} threads per process ({origin})"

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    offline = ", offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    text = f"{cache}, {free_bytes / 2**30:.0f} GiB free{offline}"
    yield "note" if free_bytes < LOW_SPACE_BYTES else "ok", "hub cache", text

    needs = (
        ("triton and a C compiler", ("CC", "gcc", "clang"))
        if has_gpu
        else ("a C++ compiler", ("CXX", "g++", "clang++"))
    )
    has_compiler = os.environ.get(needs[1][0]) or any(map(shutil.which, needs[1][1:]))
    has = has_compiler and (not has_gpu or importlib.util.find_spec("triton") is not None)
    text = f"inductor needs {needs[0]}: {'found' if has else 'not found'}"
    yield "ok" if has else "note", "torch.compile", text


def _check_all_reduce() -> Iterator[Finding]:
    """Sums numbers over two ranks of this machine."""
    from shardwise.ranks.spawn import spawn

    topic = "2-rank all-reduce"
    try:
        sums = spawn(_add_ranks, 2, timeout=SECONDS_FOR_ALL_REDUCE)
    except RuntimeError as error:
        complaint = (getattr(error, "why", None) or str(error)).strip().splitlines()[-1]
        yield "broken", topic, f"{complaint}; if gloo could not connect them, try GLOO_SOCKET_IFNAME=lo"
    else:
        yield "ok" if sums == [3.0, 3.0] else "broken", topic, f"sums over gloo: {sums}, should be 3.0"


def _add_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)
