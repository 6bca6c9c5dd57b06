"""Every error class is raised somewhere, says what the house promises, and survives a trip between processes."""

from __future__ import annotations

import ast
import functools
import inspect
import pickle

import pytest

from shardwise import errors
from tests.guards.sources import SOURCES, name_of, parse

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


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_kin_of_a_builtin_is_public_and_explains_itself(cls):
    builtin = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    assert builtin[0] not in (Exception, BaseException), f"{cls.__name__} should also be a builtin kind of error"
    assert cls.__name__ in errors.__all__
    assert inspect.getdoc(cls) != inspect.getdoc(cls.__mro__[1]), f"{cls.__name__} has no docstring of its own"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_shows_its_parts_and_travels(cls):
    error = cls("cannot split 6 heads", at="layers.0", why="6 is not a multiple of 4", fix="use tp_size 2")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    for part in ("cannot split 6 heads", "layers.0", "6 is not a multiple of 4", "use tp_size 2"):
        assert part in str(error)
    assert isinstance(error, errors.ShardwiseError)


def test_nothing_raises_the_root_or_a_bare_exception():
    bad = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in ("Exception", "BaseException", "ShardwiseError")
    ]
    assert not bad, "raise the subclass that says whose fault it is"
