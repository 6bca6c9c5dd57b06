"""Every error class is raised somewhere, says what the house promises, and survives a trip between processes."""

from __future__ import annotations

import ast
import functools
import inspect

import pytest

from shardwise import errors
from tests.guards.sources import SOURCES, parse

pytestmark = pytest.mark.pure

CLASSES = [
    cls
    for cls in vars(errors).values()
    if inspect.isclass(cls) and issubclass(cls, errors.ShardwiseError) and cls is not errors.ShardwiseError
]


@functools.cache
def names_called():
    return {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    }


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_raised_somewhere(cls):
    assert cls.__name__ in names_called(), f"nothing builds a {cls.__name__}: remove it, or raise it where it belongs"
