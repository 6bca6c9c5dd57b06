"""Modes of a forward: training or evaluation, inside a backward, checkpointed, compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from shardwise.errors import UnsupportedError


def is_in_backward() -> bool:
    """Returns whether autograd is running a backward, in which checkpointing recomputes forwards."""
    return torch._C._current_graph_task_id() >= 0


def is_checkpointed() -> bool:
    """Returns whether the forward runs in `torch.utils.checkpoint`, but not in reentrant checkpointing's first run."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return is_in_backward() or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint")


def leave_mode(mode: TorchFunctionMode) -> None:
    """Removes `mode` from the stack of torch function modes. Modes that were entered later stay."""
    later = []
    while (last := torch.overrides._pop_mode()) is not mode:
        later.append(last)
    for each in reversed(later):
        torch.overrides._push_mode(each)


@contextmanager
def with_attributes(owner: object, **values: Any) -> Iterator[None]:
    """Context manager: sets attributes of `owner`, and restores them afterwards."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: sets the model to eval mode, and restores the mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def has_dropout(source: nn.Module | PreTrainedConfig) -> bool:
    """Returns whether a model draws random numbers in training, judged by its modules and its config."""
    owners: list[object] = [source]
    if isinstance(source, nn.Module):
        owners = [*source.modules(), *([source.config] if getattr(source, "config", None) else [])]
    else:
        owners += [value for value in vars(source).values() if isinstance(value, PreTrainedConfig)]
    return any(vars(owner)[name] > 0 for owner in owners for name in dropout_chances(owner))


def dropout_chances(owner: object) -> Iterator[str]:
    """Yields the names of attributes that are dropout probabilities or router noise."""
    for name, value in vars(owner).items():
        if isinstance(owner, nn.Dropout):
            is_chance = name == "p"
        else:
            is_chance = isinstance(value, float) and ("drop" in name or "jitter" in name)
        if is_chance:
            yield name


@torch.compiler.disable
def refuse_compiled(what: str, *, why: str) -> None:
    """Raises `UnsupportedError` for a use of torch.compile that cannot work, outside of the compiled graph."""
    raise UnsupportedError(
        f"torch.compile of {what}",
        why=why,
        fix="pass compilation=shardwise.Compile() where the model is split: it compiles every block",
    )


_FIX = (
    'say data parallelism in the layout, such as "fsdp2.tp2" or "ddp2.tp2", and train the model itself with\n'
    "shardwise.TrainStep, a loop of your own (docs/own-loop.md), or\n"
    "from shardwise.trainer import Trainer, adapt, prepare (docs/trainer.md)"
)


def refuse_wrapped(*modules: nn.Module) -> None:
    """Raises `UnsupportedError` if one of the modules is `DistributedDataParallel`, `DataParallel` or FSDP."""
    for module in modules:
        if isinstance(module, DistributedDataParallel | nn.DataParallel | FullyShardedDataParallel | FSDPModule):
            wrapper = type(module).__name__ if "DataParallel" in type(module).__name__ else "FSDP"
            raise UnsupportedError(
                f"a model in {wrapper}",
                why="it assumes equal copies of all parameters on all ranks, or shards them itself",
                fix=_FIX,
            )


def refuse_ddp(*_: Any) -> None:
    """Forward pre-hook of a split model: raises if a `DistributedDataParallel` around the model is running."""
    around = getattr(DistributedDataParallel, "_active_ddp_module", None)  # torch 2.11 to 2.14
    if around is not None:
        refuse_wrapped(around)
