"""`parallel_layers.save` and `load`: what each rank holds, in a file of its own; or one file of full tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.rank_files import load_by_rank, write_by_rank
from shardwise.compat.spelling import also_spelled
from shardwise.errors import ConfigError
from shardwise.plan.options import check_kind

__all__ = ["load", "save"]


@also_spelled(checkpoint="state_dict", output_dir="save_dir")
def save(
    state_dict: Mapping[str, Any],
    save_dir: str | os.PathLike[str],
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Writes what this rank holds to `save_dir/tp_rank_TT_pp_rank_PP/checkpoint.pt`, complete or not at all.

    Args:
        save_xser: a file for every tensor, in `tp_rank_TT_pp_rank_PP.tensors/`; `load` needs `load_xser` then.
        master_dp_only: only data rank 0 writes; else every one, with `_dp_rank_DD` in its name.
        others: see `shardwise.compat.rank_files.write_by_rank`.
    """
    check_kind("state_dict", state_dict, Mapping, fix="pass a dictionary, such as model.state_dict()")
    write_by_rank(
        dict(state_dict),
        save_dir,
        current_mesh(),
        serially=save_serially,
        by_data_rank=not master_dp_only,
        file_per_tensor=save_xser,
        dtype=torch.bfloat16 if down_cast_bf16 else None,
    )


@also_spelled(chkpt_path="load_dir")
def load(
    load_dir: str | os.PathLike[str],
    model_or_optimizer: nn.Module | torch.optim.Optimizer | None = None,
    model_key: str = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    model: nn.Module | torch.optim.Optimizer | None = None,
    weights_only: bool = True,
) -> Any:
    """Reads what `save` wrote, at the same degrees; or with `sharded=False` one file of full tensors, at any.

    Args:
        load_dir: the directory; the file where not `sharded`.
        model_or_optimizer: what takes the entry `model_key`; `model` is another name for it.
        strict: whether names must be those of the model.
        weights_only: without meaning: pickled code is never run.

    Returns:
        The other entries; all of them where nothing takes one.

    Raises:
        LoadError: there is no such file, it has no such entry, or that is of other degrees. The same on every rank.

    Communicates: one gather of a small object over all ranks for each tp rank: one after the other reads.
    """
    target = model_or_optimizer if model_or_optimizer is not None else model
    if not sharded and target is None:
        raise ConfigError("sharded=False without a model", fix="pass the model that takes the full tensors")
    options = {"by_data_rank": not master_dp_only, "file_per_tensor": load_xser, "sharded": sharded}
    return load_by_rank(load_dir, current_mesh(), target, key=model_key, strict=strict, **options)
