"""Which rows a rank reads: those of its data rank, as many batches on every rank."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader

from shardwise.errors import BatchError
from shardwise.mesh import Mesh

__all__ = ["check_predictions", "seed_workers"]


def seed_workers(loader: DataLoader[Any], mesh: Mesh) -> None:
    """Has the loader's workers, where `seed_everything(workers=True)` asks for it, draw by data rank: ranks that differ
    in tp or pp alone must read the same.
    """
    if os.environ.get("PL_SEED_WORKERS", "0") != "0" and loader.worker_init_fn is None:
        loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=mesh.data_rank)


def check_predictions(loader: DataLoader[Any]) -> None:
    """Raises where data ranks would predict different numbers of batches: one would wait for the others for ever.

    Raises:
        BatchError: on every rank alike.
    """
    sampler, batch_size = getattr(loader.batch_sampler, "sampler", None), loader.batch_size
    if not isinstance(sampler, UnrepeatedDistributedSampler):
        return
    rows, ranks = len(sampler.dataset), sampler.num_replicas
    size = getattr(loader.batch_sampler, "batch_size", None) or batch_size or 1
    batches = [math.ceil(len(range(rank, rows, ranks)) / size) for rank in (0, ranks - 1)]
    if batches[0] != batches[1]:
        raise BatchError(
            f"predictions of {rows} rows over {ranks} data ranks in batches of {size}",
            why=f"data rank 0 would have {batches[0]} batches and data rank {ranks - 1} {batches[1]};\n"
            "forwards meet, and one would wait for ever",
            fix=f"predict a multiple of {ranks * size} rows, or use a layout without fsdp and ddp",
        )
