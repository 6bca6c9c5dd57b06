"""Cases on ranks, each a test of its own: those that share a layout run together, and each answers for itself.

    def losses(mesh, family, tied):  # what every rank does, in one case
        ...

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    @pytest.mark.parametrize("layout", ["tp2", "tp4"])
    def test_losses(on_ranks, layout, family, tied):
        for loss in on_ranks(losses):  # what each rank returned, in rank order
            ...

`-k` selects cases, and only those selected run. A case that raises, hangs or ends a rank leaves the others unharmed:
the cases that shared its ranks then run again, each on ranks of its own.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import pytest
import torch

import shardwise
from shardwise.ranks.spawn import spawn
from shardwise.topology.shape import MeshShape

MAX_TOGETHER = 12
"""Cases that one set of ranks runs: starting ranks costs as much as a small case, and a test has a time limit."""

_FOUND = pytest.StashKey[dict[str, list[Any]]]()
_ALONE = pytest.StashKey[set[str]]()


class Ranks:
    """What the fixture `on_ranks` hands to one test: see the module's docstring."""

    def __init__(self, item: pytest.Function) -> None:
        self._item = item

    def __call__(
        self, function: Callable[..., Any], *, layout: str | None = None, timeout: float = 100.0, **same: Any
    ) -> list[Any]:
        """What `function(mesh, ...)` returns on each rank, given those of the test's parameters that it takes.

        Args:
            layout: of the mesh; by default the parameter `layout`.
            same: further arguments, the first test's for all that run together with it.
        """
        run = functools.partial(_run, function, layout or _params(self._item)["layout"], timeout, same)
        found = self._item.session.stash.setdefault(_FOUND, {})
        alone = self._item.session.stash.setdefault(_ALONE, set())
        items = self._together()
        if self._item.nodeid not in found and self._item.nodeid not in alone and len(items) > 1:
            try:
                found |= run(items)
            except Exception:  # noqa: BLE001 - each of them tells by itself whose it is
                alone |= {item.nodeid for item in items}
        if self._item.nodeid not in found:
            found |= run([self._item])
        return found.pop(self._item.nodeid)

    def _together(self) -> list[pytest.Function]:
        """This test and the next selected ones that differ from it in other parameters than the layout."""
        mine, layout = _name(self._item), _params(self._item).get("layout")
        items = [item for item in self._item.session.items if isinstance(item, pytest.Function)]
        alike = [item for item in items if _name(item) == mine and _params(item).get("layout") == layout]
        at = alike.index(self._item)
        return alike[at : at + MAX_TOGETHER]


def _name(item: pytest.Function) -> str:
    return item.nodeid.split("[")[0]


def _params(item: pytest.Function) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _run(
    function: Callable[..., Any], layout: str, timeout: float, same: Mapping[str, Any], items: Sequence[pytest.Function]
) -> dict[str, list[Any]]:
    """The ranks' results by the items' ids."""
    taken = inspect.signature(function).parameters
    cases = [{**{name: value for name, value in _params(item).items() if name in taken}, **same} for item in items]
    ranks = spawn(run_cases, MeshShape.parse(layout).world_size, function, layout, cases, timeout=timeout)
    return {item.nodeid: [rank[at] for rank in ranks] for at, item in enumerate(items)}


def run_cases(function: Callable[..., Any], layout: str, cases: Sequence[Mapping[str, Any]]) -> list[Any]:
    """On each rank: the function's result in every case, with the same seeds as if it were the only one."""
    found = []
    with shardwise.Mesh.open(layout) as mesh:
        for case in cases:
            random.seed(0)
            numpy.random.seed(0)
            torch.manual_seed(0)
            found.append(function(mesh, **case))
    return found
