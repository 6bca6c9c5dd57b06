"""Validation: the loss on held-out rows, the same for every layout."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.operations import all_reduce_
from shardwise.data.ahead import send
from shardwise.data.batch import IGNORED, count_targets
from shardwise.data.rows import Rows
from shardwise.mesh import Mesh
from shardwise.runtime.adapters import find_model
from shardwise.runtime.modes import in_eval_mode
from shardwise.topology.axes import DATA_AXES


def build_evaluation(
    model: nn.Module, mesh: Mesh, batches: Callable[[], Iterator[dict[str, Tensor]]]
) -> Callable[[], float]:
    """Returns a function that computes the mean loss over all target tokens of `batches()`, the same on every rank.

    The model runs in eval mode; afterwards every module is in its previous mode. The loss is NaN if there are no
    targets.

    Communicates: what the model's forwards do, and over the data ranks one all-reduce of two values.
    """
    # Beside a cache, transformers' models take rows for one document each (see [Note: packed rows]).
    takes_cache = "use_cache" in inspect.signature(find_model(model).forward).parameters
    without_cache: dict[str, Any] = {"use_cache": False} if takes_cache else {}

    @torch.no_grad()
    def evaluate() -> float:
        totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        with in_eval_mode(model):
            for batch in batches():
                count = count_targets(model, batch)
                # Other ranks wait for this one, so it computes a loss even where nothing counts.
                labels = batch["labels"] if count else torch.zeros_like(batch["labels"])
                inputs = {**without_cache, **batch, "labels": labels}
                loss = model(**{name: send(value, mesh.device) for name, value in inputs.items()}).loss
                totals += torch.stack([loss.double() * count, torch.full_like(loss, count, dtype=torch.float64)])
        group = mesh.group(*DATA_AXES)
        if group is not None:
            all_reduce_(totals, group)
        return float(totals[0] / totals[1])

    return evaluate


def evaluation_batches(
    rows: Rows,
    *,
    batch_size: int,
    max_batches: int,
    data_rank: int = 0,
    data_size: int = 1,
) -> Iterator[dict[str, Tensor]]:
    """Yields this data rank's share of every global batch of rows, in order.

    The last batch is filled up with rows whose labels are all ignored, so that every rank gets equally many batches of
    equal shape.
    """
    num_rows = min(rows.num_rows, batch_size * max_batches)
    share = batch_size // data_size
    for first in range(0, num_rows, batch_size):
        places = range(first, first + batch_size)
        batch = [min(place, num_rows - 1) for place in places]
        own = slice(data_rank * share, (data_rank + 1) * share)
        found = rows.read(batch[own], batch=batch)
        found["labels"][[place >= num_rows for place in places[own]]] = IGNORED
        yield found
