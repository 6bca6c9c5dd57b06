"""`adapt`: a Trainer class for split models, made of any Trainer class."""

import functools
import inspect
from typing import Any

import transformers

from shardwise.errors import UnsupportedError
from shardwise.trainer.adapted import SplitTrainer
from shardwise.trainer.checkpoint import SavesSplitModels


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
    return type(trainer.__name__, (SplitTrainer, trainer), {"__doc__": trainer.__doc__, "__module__": __name__})


def check_overridden(own: type[Any], overridden: type[Any]) -> None:
    """Raises if a method that `own` overrides is missing in `overridden`, or takes other arguments there.

    Names that `overridden` lacks and that no call of `super()` in `own` uses are `own`'s.
    """
    for name, method in vars(own).items():
        if (
            name.startswith("__")
            or not inspect.isfunction(method)
            or f"super().{name}" not in inspect.getsource(method)
        ):
            continue
        theirs = getattr(overridden, name, None)
        given = [each for each in inspect.signature(method).parameters.values() if each.name not in ("args", "options")]
        if theirs is None or not {each.name for each in given} <= {*inspect.signature(theirs).parameters}:
            raise UnsupportedError(
                f"{overridden.__name__}.{name} of transformers {transformers.__version__}",
                why="shardwise.trainer overrides it, and it is gone or takes other arguments",
                fix="use a version of transformers that docs/trainer.md lists",
            )


for _own in (SplitTrainer, SavesSplitModels):
    check_overridden(_own, transformers.Trainer)

Trainer: Any = adapt(transformers.Trainer)
Seq2SeqTrainer: Any = adapt(transformers.Seq2SeqTrainer)
