"""`shardwise doctor`: is this machine ready?"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardwise.split.compiled import CompileCount

__all__ = ["HELP", "Finding", "add_arguments", "run"]

HELP = """\
Look this machine over: versions, devices, communication backends, threads, the hub cache, what torch.compile makes of a
block, and a real all-reduce between two CPU ranks. The exit code is 1 if something is broken.

  shardwise doctor
"""

OPTIONAL = {"datasets": "data.dataset", "tensorboard": "log.tensorboard", "peft": "adapters"}
SECONDS_FOR_ALL_REDUCE = 120
LOW_SPACE_BYTES = 5 * 2**30

# One rank of the self-test, as a program: it must not depend on how this process was started.
RANK = """
import datetime, sys, torch, torch.distributed as dist
timeout = datetime.timedelta(seconds=60)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2, timeout=timeout)
total = torch.full((4,), 1.0 + dist.get_rank())
dist.all_reduce(total)
dist.destroy_process_group()
sys.exit(0 if total.tolist() == [3.0] * 4 else "wrong sum: " + str(total.tolist()))
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what.
        state: whether it is well; `note` is worth knowing, `broken` makes the exit code 1.
        text: what was found, and the remedy if it is not well.
    """

    topic: str
    state: Literal["ok", "note", "broken"]
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
    yield Finding(topic="python", state="ok", text=f"{platform.python_version()}, {platform.platform()}")
    yield from _check_packages()
    yield from _check_devices()
    yield from _check_threads()
    yield _check_hub_cache()
    yield from _check_compilation()
    yield _check_all_reduce()


def _check_packages() -> Iterator[Finding]:
    try:
        requirements = importlib.metadata.requires("shardwise") or []
        yield Finding(topic="shardwise", state="ok", text=importlib.metadata.version("shardwise"))
    except importlib.metadata.PackageNotFoundError:
        requirements = ["torch", "transformers"]
        text = "runs from its sources, so the versions it needs are not checked; pip install -e . registers it"
        yield Finding(topic="shardwise", state="note", text=text)
    for requirement in requirements:
        specifier, _, marker = requirement.partition(";")
        if "extra" in marker:
            continue
        name = re.split(r"[<>=!~ ]", specifier, maxsplit=1)[0]
        yield _check_package(name, specifier.removeprefix(name).strip())
    for name, use in OPTIONAL.items():
        try:
            yield Finding(topic=name, state="ok", text=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(topic=name, state="note", text=f"not installed; only needed for {use}")


def _check_package(name: str, wanted: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(topic=name, state="broken", text=f"not installed; pip install '{name}{wanted}'")
    least = wanted.removeprefix(">=")
    if wanted.startswith(">=") and _numbers(version) < _numbers(least):
        return Finding(topic=name, state="broken", text=f"{version}, need {wanted}; pip install -U '{name}{wanted}'")
    return Finding(topic=name, state="ok", text=version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _check_devices() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            yield Finding(topic=f"cuda:{index}", state="ok", text=text)
    else:
        yield Finding(topic="devices", state="note", text="no GPU; ranks run on the CPU")
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(topic="gloo", state="broken", text="this build of torch lacks it; install one from PyPI")
    else:
        yield Finding(topic="gloo", state="ok", text="available")
    if dist.is_available() and dist.is_nccl_available():
        yield Finding(topic="nccl", state="ok", text="available")
    elif torch.cuda.is_available():
        yield Finding(topic="nccl", state="broken", text="this build of torch lacks it, and GPUs need it")


def _check_threads() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS")
    text = f"{cores} cores, torch uses {torch.get_num_threads()} threads a process"
    text += f" (OMP_NUM_THREADS={asked})" if asked else " (shardwise train divides the cores among its ranks)"
    is_crowded = asked is not None and asked.isdigit() and int(asked) > cores
    yield Finding(topic="threads", state="note" if is_crowded else "ok", text=text)


def _check_hub_cache() -> Finding:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    standing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if not os.access(standing, os.W_OK):
        return Finding(topic="hub cache", state="broken", text=f"{cache} cannot be written; set HF_HOME elsewhere")
    free_bytes = shutil.disk_usage(standing).free
    offline = ", offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    text = f"{cache}, {free_bytes / 2**30:.0f} GiB free{offline}"
    return Finding(topic="hub cache", state="note" if free_bytes < LOW_SPACE_BYTES else "ok", text=text)


def _check_compilation() -> Iterator[Finding]:
    """What torch.compile makes of a block, traced without generating code, and whether inductor could generate it."""
    import torch

    topic = "torch.compile"
    try:
        found = _compile_block()
    except Exception as error:  # a broken compiler stack fails in any way  # noqa: BLE001
        yield Finding(topic=topic, state="note", text=f"cannot trace a block: {type(error).__name__}: {error}")
    else:
        is_whole = not found.graph_breaks and not found.recompiles
        yield Finding(topic=topic, state="ok" if is_whole else "note", text=f"the blocks of a llama: {found}")
    needs = "triton" if torch.cuda.is_available() else "a C++ compiler"
    has = importlib.util.find_spec("triton") is not None if torch.cuda.is_available() else _find_cpp_compiler()
    text = f"{needs} found" if has else f"{needs} is missing, and inductor needs it; everything else works without"
    yield Finding(topic="inductor", state="ok" if has else "note", text=text)


def _compile_block() -> CompileCount:
    """Two blocks, two steps: everything behind the first block's first run should be reuse."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwise.api.building import parallelize
    from shardwise.mesh import Mesh
    from shardwise.plan.options import Compile
    from shardwise.split.compiled import count_compilation
    from shardwise.train.step import TrainStep

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, pad_token_id=0)).train()
    ids = torch.ones(2, 8, dtype=torch.long)
    with warnings.catch_warnings(), Mesh.open("tp1", device="cpu") as mesh:
        warnings.simplefilter("ignore")  # torch's tracing warns of what it does itself
        step = TrainStep(parallelize(model, mesh, compilation=Compile(backend="aot_eager")), mesh)
        for _ in range(2):
            step({"input_ids": ids, "labels": ids})
    return count_compilation()


def _find_cpp_compiler() -> bool:
    asked = os.environ.get("CXX")
    return any(shutil.which(name) for name in ([asked] if asked else ["g++", "clang++", "c++", "cl"]))


def _check_all_reduce() -> Finding:
    """Two ranks of this machine add numbers."""
    topic = "2-rank all-reduce"
    complaint = _run_all_reduce()
    if complaint:
        fix = "gloo could not connect them; try GLOO_SOCKET_IFNAME=lo"
        return Finding(topic=topic, state="broken", text=f"{complaint}; {fix}")
    return Finding(topic=topic, state="ok", text="right sum over gloo")


def _run_all_reduce() -> str:
    """What went wrong, or nothing."""
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as directory:
        command = [sys.executable, "-W", "ignore", "-c", RANK, str(Path(directory) / "store")]
        ranks = [
            subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            for rank in range(2)
        ]
        try:
            errors = [rank.communicate(timeout=SECONDS_FOR_ALL_REDUCE)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return f"the ranks did not finish within {SECONDS_FOR_ALL_REDUCE} seconds"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    failed = [error for error, rank in zip(errors, ranks, strict=True) if rank.returncode]
    return (failed[0].strip().splitlines() or ["a rank failed without a message"])[-1] if failed else ""
