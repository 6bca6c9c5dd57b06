"""Which tests stay in one process of a parallel run, because they share ranks or a fixture of their module.

pytest-xdist's own groups stand at the end of a test's id, which pytest 9.2 no longer lets it change: every test then
went to any process, and each process started the shared ranks again. So we keep the groups beside the ids, in a file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

PROGRAM = 20
"""A test that may start whole programs, or has a time limit of its own, takes as long as so many others."""


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands out groups of tests in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # `arrange` did it
        self._groups: dict[str, str] = {}

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        if (path := _path(node.workerinput)).exists():  # else collecting has failed, which is reported later
            self._groups |= json.loads(path.read_text(encoding="utf-8"))
        super().add_node_collection(node, collection)

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid, nodeid)


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of a parallel run: has the largest groups begin, and tells `Groups` of them."""
    groups = {item.nodeid: _group_of(item) for item in items}
    sizes = Counter[str]()
    for item in items:
        sizes[groups[item.nodeid]] += PROGRAM if _is_long(item) else 1
    first = {group: number for number, group in enumerate(dict.fromkeys(groups.values()))}
    items.sort(key=lambda item: (-sizes[groups[item.nodeid]], first[groups[item.nodeid]]))
    path = _path(config.workerinput)  # type: ignore[attr-defined]  # where xdist keeps what a worker was told
    (own := path.with_name(f"{path.name}-{os.getpid()}")).write_text(json.dumps(groups), encoding="utf-8")
    own.replace(path)


def _is_long(item: pytest.Item) -> bool:
    if "subprocess" in vars(getattr(item, "module", item)) or item.get_closest_marker("timeout"):
        return True
    return "run_forked" in getattr(item, "fixturenames", ())


def _group_of(item: pytest.Item) -> str:
    if not isinstance(item, pytest.Function):
        return item.nodeid
    module = item.nodeid.partition("::")[0]
    if "on_ranks" in item.fixturenames:
        layout = item.callspec.params.get("layout", "") if hasattr(item, "callspec") else ""
        return f"{module}::{layout}"
    fixtures = [each for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
    is_shared = any(each.scope == "module" and each.baseid.endswith(module) for each in fixtures)
    return module if is_shared else item.nodeid


def _path(told: dict[str, Any]) -> Path:
    """Every process of a run writes the same here."""
    return Path(os.environ["HF_HOME"]) / f"groups-{told['testrunuid']}.json"
