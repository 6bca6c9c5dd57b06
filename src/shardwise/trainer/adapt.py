"""`adapt`: a Trainer class for split models, made of any Trainer class."""

import functools
from typing import Any

import transformers

from shardwise.accelerate.overrides import check_overridden
from shardwise.trainer.adapted import SplitTrainer
from shardwise.trainer.checkpoint import SavesSplitModels
from shardwise.trainer.losses import SharesLosses

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


for _mixin in (SplitTrainer, SharesLosses, SavesSplitModels):
    check_overridden(_mixin, transformers.Trainer)

Trainer: Any = adapt(transformers.Trainer)
Seq2SeqTrainer: Any = adapt(transformers.Seq2SeqTrainer)
