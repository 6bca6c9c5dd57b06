"""Sizes, names and where code may stand: the house rules that a parser can check."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys

import pytest

from shardwise import errors
from tests.guards.sources import PACKAGE, SOURCES, name_of, parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

pytestmark = pytest.mark.pure

COMPAT = PACKAGE / "compat"
"""Names and packages in there are those of other systems, whose front doors they are."""
DOORS = PACKAGE, PACKAGE / "lightning", PACKAGE / "trainer"
"""Their names are what users import: an __init__ imports them from where they are, and does nothing else."""
ROOMS_WITHOUT_TORCH = {"estimate", "plan", "schedule", "sharding", "topology", "failure", "errors", "versions"}


def test_modules_explain_themselves_and_a_package_init_does_nothing_else():
    found = []
    for path in SOURCES:
        module = parse(path)
        if not (path.parent / "__init__.py").exists():
            found.append(f"{name_of(path.parent)} has no __init__.py")
        if not ast.get_docstring(module):
            found.append(f"{name_of(path)} has no docstring")
        is_front_door = path.parent in DOORS or COMPAT in path.parent.parents
        if path.name == "__init__.py" and not is_front_door and len(module.body) != 1:
            found.append(f"{name_of(path)}: code in a package's __init__ is how import knots begin")
    assert not found


def test_inside_the_package_leaf_modules_are_imported():
    """Neither `from shardwise import X` nor `from shardwise.sharding import X` where X is not a module."""
    found = []
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "shardwise":
                continue
            target = PACKAGE.joinpath(*node.module.split(".")[1:])
            if target.is_dir() and not all(
                (target / f"{alias.name}.py").exists() or (target / alias.name).is_dir() for alias in node.names
            ):
                found.append(f"{name_of(path)}:{node.lineno} imports {node.module}'s __init__")
    assert not found


def test_rooms_without_torch_load_without_torch():
    """The contract sees import statements; this sees what really gets loaded, through the front door included."""
    paths = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in ROOMS_WITHOUT_TORCH]
    parts = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths]
    modules = [".".join(part for part in names if part != "__init__") for names in parts]
    code = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", f"loaded: {run.stdout} {run.stderr}"


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
