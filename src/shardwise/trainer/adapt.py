"""`adapt`: a Trainer class for split models, made of any Trainer class."""

import functools
import inspect
import sys
from typing import Any

import transformers
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler

from shardwise.errors import UnsupportedError
from shardwise.trainer.accelerator import SplitAccelerator
from shardwise.trainer.adapted import SplitTrainer
from shardwise.trainer.checkpoint import SavesSplitModels
from shardwise.trainer.losses import SharesLosses
from shardwise.trainer.prepared import SplitLoader, SplitScheduler
from shardwise.trainer.state import SavesState

_HIDDEN = ("compute_loss", "evaluation_loop", "get_batch_samples", "prediction_step", "training_step")


@functools.cache
def adapt(trainer: type[Any]) -> type[Any]:
    """Returns a subclass of a `transformers.Trainer` class that also takes split models; see `SplitTrainer`.

    With a model that is not split it is the class itself, in every digit. Nothing outside of the returned class is
    changed.

    Args:
        trainer: `transformers.Trainer`, one of TRL's, or a subclass of one of them.

    Raises:
        TypeError: it is no subclass of `transformers.Trainer`.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise TypeError(f"adapt takes a subclass of transformers.Trainer, got {trainer!r}")
    if issubclass(trainer, SplitTrainer):
        return trainer
    mixin: type[Any] = SplitTrainer
    if any(each.__module__.startswith("trl.") for each in trainer.__mro__):
        from shardwise.trainer.trl_trainers import mixin_for

        mixin = mixin_for(trainer)
    members = {"__doc__": trainer.__doc__, "__module__": __name__, "_adapted": trainer}
    return type(trainer.__name__, (mixin, trainer), members | {"__init_subclass__": classmethod(_put_around)})


def _put_around(cls: type[Any]) -> None:
    """Makes a subclass of an adapted class that hides the mixin's losses or steps one that is adapted itself."""
    number = next(number for number, each in enumerate(cls.__mro__) if "_adapted" in vars(each))
    hidden = [name for each in cls.__mro__[:number] for name in _HIDDEN if name in vars(each)]
    if hidden and not any("_adapted" in vars(each) for each in cls.__bases__):
        raise TypeError(
            f"{cls.__name__} overrides {hidden[0]}, as the Trainer of shardwise.trainer does: derive it from "
            f"transformers.Trainer, and use shardwise.trainer.adapt({cls.__name__})"
        )
    if hidden:
        cls.__bases__ = tuple(vars(each).get("_adapted", each) for each in cls.__bases__)
        cls.__new__ = lambda kind, *_, **__: object.__new__(adapt(kind))  # type: ignore[assignment]


def check_overridden(own: type[Any], overridden: type[Any]) -> None:
    """Raises if a method that `own` marks with `@override` is missing in `overridden`, or has other arguments there."""
    for name, method in vars(own).items():
        function = method.__func__ if isinstance(method, staticmethod) else method
        is_property = isinstance(method, property) and not name.startswith("_")
        if not is_property and not getattr(function, "__override__", False):
            continue
        theirs = getattr(overridden, name, None)
        names = set() if is_property else {*inspect.signature(function).parameters} - {"args", "options"}
        if theirs is None or (names and not names <= {*inspect.signature(theirs).parameters}):
            package = overridden.__module__.partition(".")[0]
            raise UnsupportedError(
                f"{overridden.__name__}.{name} of {package} {getattr(sys.modules[package], '__version__', '')}",
                why="shardwise.trainer overrides it, and it is gone or takes other arguments",
                fix=f"use a version of {package} that docs/trainer.md lists",
            )


for _own, _overridden in (
    (SplitTrainer, transformers.Trainer),
    (SharesLosses, transformers.Trainer),
    (SavesSplitModels, transformers.Trainer),
    (SplitAccelerator, Accelerator),
    (SavesState, Accelerator),
    (SplitScheduler, AcceleratedScheduler),
    (SplitLoader, DataLoaderShard),
):
    check_overridden(_own, _overridden)

Trainer: Any = adapt(transformers.Trainer)
Seq2SeqTrainer: Any = adapt(transformers.Seq2SeqTrainer)
