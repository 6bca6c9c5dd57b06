"""Everything that the documents name is there, with their parameters, order and defaults."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

from tests.compat.documented import DOCUMENTED, Item

pytestmark = pytest.mark.single


def find(path: str) -> Any:
    """What stands at `path` below `shardwise.compat`; raises AttributeError where nothing does."""
    parts = ["shardwise", "compat", *path.split(".")]
    for length in range(len(parts), 2, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            fields = getattr(found, "__dataclass_fields__", {})
            found = fields[name] if name in fields else getattr(found, name)
        return found
    raise AttributeError(path)


def parameters(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    own = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    return [(each.name, each.kind, each.default) for each in own]


def documented(item: Item) -> list[tuple[str, Any, Any]]:
    place: dict[str, Any] = {"torch": torch}
    exec(f"def item{item.signature}: ...", place)
    return parameters(inspect.signature(place["item"]))


@pytest.mark.parametrize("item", DOCUMENTED, ids=lambda item: item.path)
def test_an_item_is_as_its_document_prints_it(item):
    found = find(item.path)
    if not item.signature:
        return
    expected, own = documented(item), parameters(inspect.signature(found))
    collects = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    named, mine = ([each for each in given if each[1] not in collects] for given in (expected, own))
    assert mine[: len(named)] == named
    assert {kind for _, kind, _ in expected if kind in collects} <= {kind for _, kind, _ in own}
    more = mine[len(named) :]
    assert all(default is not inspect.Parameter.empty for *_, default in more), "callers of the document do not pass it"


def test_every_document_has_items():
    assert {item.document for item in DOCUMENTED} == {0, 1, 2, 3, 4}
    assert len({item.path for item in DOCUMENTED}) == len(DOCUMENTED)
