"""Loaders and schedulers that an accelerator of a split model has prepared; see [Note: a loop of accelerate's]."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from typing_extensions import override

from shardwise.accelerate.rows import without_copies
from shardwise.train.one_loss import mark_rows

if TYPE_CHECKING:
    from shardwise.accelerate.accelerator import SplitAccelerator


class SplitLoader(DataLoaderShard):
    """A loader of this data rank's rows. In the last batch, rows that fill it up have no targets."""

    accelerator: "SplitAccelerator"

    @classmethod
    def of(cls, loader: DataLoaderShard, accelerator: "SplitAccelerator") -> "SplitLoader":
        """Returns a loader that accelerate has prepared as one of these."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(loader), accelerator=accelerator)
        return made

    @override
    def __iter__(self) -> Iterator[Any]:
        accelerator = self.accelerator
        before, models = accelerator.rows, accelerator._models
        try:
            for batch in super().__iter__():
                accelerator.rows = rows = accelerator.take_rows(batch, self)
                own = without_copies(batch, rows, next((each for each in models if each.training), None))
                if rows is not None and rows.is_uneven:
                    # The mean over no targets would be 0/0 in a loss of one's own.
                    own = mark_rows(own if rows.own else batch, rows.counts, rows.rank)
                yield own
        finally:
            accelerator.rows = before


class SplitScheduler(AcceleratedScheduler):
    """A scheduler that steps `steps` times after an optimizer's step: once for each data rank."""

    steps: int

    @override
    def step(self, *args: Any, **options: Any) -> None:
        """Steps, if the optimizer has."""
        is_counted = self.step_with_optimizer and self.gradient_state.sync_gradients
        ends = getattr(self.scheduler, "total_steps", None)  # OneCycleLR's, which raises after them
        for number in range(self.steps if is_counted else 1):
            if not number or ends is None or self.scheduler.last_epoch < ends:
                super().step(*args, **options)
