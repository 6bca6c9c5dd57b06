"""Splits and trains tiny models in the process that ranks of tests are forked from, on meshes that are not there.

What a process does for its first model only takes as long as a small case: modules that are imported when first needed,
sources that torch reads for the stacks it records, shapes that DTensor's operations have. Ranks inherit all of it.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import conversion_mapping

import shardwise
from shardwise.api.rehearsal import fake_mesh
from shardwise.parameters.canonical import canonical_tensors
from shardwise.parameters.registry import find_parameters
from shardwise.proof.parity import OPTIMIZER
from shardwise.topology.shape import MeshShape
from tests.families import tiny_batch, tiny_model

__all__: list[str] = []

LAYOUTS = {"tp7": {"num_attention_heads": 14, "num_key_value_heads": 7, "hidden_size": 112}, "fsdp7": {}}
"""Of sizes that no test has: what torch keeps by mesh is found by none of theirs. With what the model then needs."""


def train(layout: str, options: dict[str, int]) -> None:
    with fake_mesh(MeshShape.parse(layout)) as mesh:
        model = shardwise.parallelize(tiny_model("llama", **options), mesh)
        conversion_mapping.get_checkpoint_conversion_mapping("llama")  # compiles those of every family
        optimizers = (
            torch.optim.AdamW(model.parameters(), **OPTIMIZER),
            shardwise.build_optimizer(model, torch.optim.AdamW, **OPTIMIZER),
            shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-4),
        )
        batch = tiny_batch(model)
        for optimizer in optimizers:
            shardwise.TrainStep(model, mesh)(batch)
            optimizer.step()
            gradients = {name: each.grad for name, each, _ in find_parameters(model)}
            dict(canonical_tensors(model, gradients))  # `full_gradients`, without asking ranks that are not there
            optimizer.zero_grad()


_LOOP = "gloo_tcp_loop"


def lower_priority_of_gloo_loops() -> None:
    """Makes the threads that wait for gloo's sockets batch threads of lower priority, on Linux.

    When a socket is ready while another thread holds the lock of its connection, gloo's thread asks again at once, and
    again. With as many ranks as cores, the holder of the lock often waits for that very core.
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended, or the sandbox forbids it
            if (task / "comm").read_text().strip() == _LOOP:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, int(task.name), 5)


def with_lower_priority(make_group: Any) -> Any:
    @functools.wraps(make_group)
    def made(*args: Any, **kwargs: Any) -> Any:
        group = make_group(*args, **kwargs)
        lower_priority_of_gloo_loops()
        return group

    return made


if sys.platform == "linux":
    c10d: Any = torch.distributed.distributed_c10d
    c10d._new_process_group_helper = with_lower_priority(c10d._new_process_group_helper)

# A torch that is built for a device refuses to fork once autograd has run, also where there is none.
if "COVERAGE_PROCESS_START" not in os.environ and torch.accelerator.current_accelerator() is None:
    for _layout, _options in LAYOUTS.items():
        try:
            train(_layout, _options)
        except Exception:  # noqa: BLE001 - ranks are slower without, and what is broken fails in tests
            print(f"could not warm ranks up with {_layout}", file=sys.stderr)
            traceback.print_exc()
    random.seed(0)
    torch.manual_seed(0)
    gc.collect()
gc.freeze()  # as in shardwise.ranks.preloaded
