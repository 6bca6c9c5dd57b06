"""The packages for scripts of other systems are adapters: nothing is computed or sent in them."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.guards.sources import PACKAGE, ROOT, name_of, parse

COMPAT = sorted((PACKAGE / "compat").rglob("*.py"))
PACKAGES = sorted(path.parent.name for path in (PACKAGE / "compat").glob("*/__init__.py"))
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip


@pytest.mark.pure
def test_nothing_is_sent_or_differentiated_in_them():
    found = []
    for path in COMPAT:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
                found += [f"{name_of(path)}:{node.lineno} dist.{node.attr}"] if node.attr in COLLECTIVES else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                bad = COLLECTIVES.intersection(alias.name for alias in node.names)
                found += [f"{name_of(path)}:{node.lineno} imports {name}" for name in bad]
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                found += [f"{name_of(path)}:{node.lineno} {node.name}"] if any("autograd" in b for b in bases) else []
    assert not found, "these belong to comm/ and runtime/"


@pytest.mark.single
def test_importing_one_changes_nothing_process_wide():
    look = """
import signal, sys, warnings
import torch, transformers, shardwise.train.step, shardwise.api.building
import torch.distributed.fsdp, torch.distributed.tensor.parallel
from torch.optim import optimizer
def state():
    nn = torch.nn
    classes = (nn.Linear, nn.Embedding, nn.Module, torch.optim.Optimizer, transformers.PreTrainedModel)
    return (
        [dict(vars(each)) for each in classes], dict(vars(nn.functional)), dict(optimizer._global_optimizer_pre_hooks),
        signal.getsignal(signal.SIGINT), list(warnings.filters), torch.get_default_dtype(), sys.excepthook,
        torch.distributed.is_initialized(), torch.get_rng_state().tolist(),
    )
before = state()
"""
    imports = "\n".join(f"import shardwise.compat.{name}" for name in PACKAGES)
    code = f"{look}{imports}\nassert state() == before"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
