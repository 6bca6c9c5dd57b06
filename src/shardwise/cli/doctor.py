"""`shardwise doctor`: is this machine ready?"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

__all__ = ["HELP", "Finding", "add_arguments", "run"]

HELP = """\
Look this machine over: versions, devices, communication backends, threads, the hub cache, what torch.compile needs, and
a real all-reduce between two CPU ranks. The exit code is 1 if something is broken.

  shardwise doctor
"""

OPTIONAL = {"datasets": "data.dataset", "tensorboard": "log.tensorboard", "peft": "adapters"}
SECONDS_FOR_ALL_REDUCE = 120
LOW_SPACE_BYTES = 5 * 2**30


class Finding(NamedTuple):
    """One thing that was looked at: whether it is `ok`, worth a `note` or `broken`; what it is; what was found, and the
    remedy if it is not well.
    """

    state: str
    topic: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`shardwise doctor` takes none."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    num_broken = 0
    for finding in _examine():
        num_broken += finding.state == "broken"
        print(f"{finding.state:<7} {finding.topic:<18} {finding.text}", flush=True)
    print("\nthis machine is ready" if num_broken == 0 else f"\n{num_broken} broken")
    return 1 if num_broken else 0


def _examine() -> Iterator[Finding]:
    """Everything, what is slow last."""
    yield Finding("ok", "python", f"{platform.python_version()}, {platform.platform()}")
    yield from _check_packages()
    yield from _check_devices()
    yield _check_threads()
    yield _check_hub_cache()
    yield _check_inductor()
    yield _check_all_reduce()


def _check_packages() -> Iterator[Finding]:
    try:
        needed = importlib.metadata.requires("shardwise") or []
        yield Finding("ok", "shardwise", importlib.metadata.version("shardwise"))
    except importlib.metadata.PackageNotFoundError:
        needed = ["torch", "transformers"]
        yield Finding("note", "shardwise", "runs from its sources: `pip install -e .` says which versions it needs")
    for requirement in map(Requirement, needed):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            version = _version_of(requirement.name)
            fits = version is not None and requirement.specifier.contains(version, prereleases=True)
            text = version if fits else f"{version or 'not installed'}; pip install -U '{requirement}'"
            yield Finding("ok" if fits else "broken", requirement.name, str(text))
    for name, use in OPTIONAL.items():
        version = _version_of(name)
        yield Finding("ok" if version else "note", name, version or f"not installed; only needed for {use}")


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_devices() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    has_gpu = torch.cuda.is_available()
    for index in range(torch.cuda.device_count() if has_gpu else 0):
        properties = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if not has_gpu:
        yield Finding("note", "devices", "no GPU; ranks run on the CPU")
    for backend, is_needed in (("gloo", True), ("nccl", has_gpu)):
        if dist.is_available() and dist.is_backend_available(backend):
            yield Finding("ok", backend, "available")
        elif is_needed:
            yield Finding("broken", backend, "this build of torch lacks it; install one from PyPI")


def _check_threads() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    origin = f"OMP_NUM_THREADS={asked}" if asked else "shardwise train divides the cores among its ranks"
    is_crowded = asked.isdigit() and int(asked) > cores
    text = f"{cores} cores, torch uses {torch.get_num_threads()} threads a process ({origin})"
    return Finding("note" if is_crowded else "ok", "threads", text)


def _check_hub_cache() -> Finding:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    standing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if not os.access(standing, os.W_OK):
        return Finding("broken", "hub cache", f"{cache} cannot be written; set HF_HOME elsewhere")
    free_bytes = shutil.disk_usage(standing).free
    offline = ", offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    text = f"{cache}, {free_bytes / 2**30:.0f} GiB free{offline}"
    return Finding("note" if free_bytes < LOW_SPACE_BYTES else "ok", "hub cache", text)


def _check_inductor() -> Finding:
    import torch

    asked = os.environ.get("CXX")
    compilers = [asked] if asked else ["g++", "clang++", "c++", "cl"]
    needs, has = "a C++ compiler", any(map(shutil.which, compilers))
    if torch.cuda.is_available():
        needs, has = "triton", importlib.util.find_spec("triton") is not None
    text = f"{needs} found" if has else f"{needs} is missing, and inductor needs it; everything else works without"
    return Finding("ok" if has else "note", "torch.compile", text)


def _check_all_reduce() -> Finding:
    """Two ranks of this machine add numbers."""
    from shardwise.testing.spawn import spawn

    topic = "2-rank all-reduce"
    try:
        sums = spawn(_add_ranks, 2, timeout=SECONDS_FOR_ALL_REDUCE)
    except RuntimeError as error:
        complaint = (getattr(error, "why", None) or str(error)).strip().splitlines()[-1]
        return Finding("broken", topic, f"{complaint}; if gloo could not connect them, try GLOO_SOCKET_IFNAME=lo")
    return Finding("ok" if sums == [3.0, 3.0] else "broken", topic, f"sums over gloo: {sums}, should be 3.0")


def _add_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)
