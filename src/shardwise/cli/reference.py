"""The keys of a training configuration as a page of help, taken from the dataclasses themselves."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from shardwise.train.config import TrainConfig

__all__ = ["config_reference"]


def config_reference() -> str:
    """Every key with its default and what it means."""
    rows = list(_rows(TrainConfig, ""))
    width = max(len(key) for key, _, _ in rows)
    lines = []
    for key, default, meaning in rows:
        text = f"{meaning} [{default}]" if default else meaning
        lines += textwrap.wrap(
            text, 110, initial_indent=f"  {key:<{width}}  ", subsequent_indent=" " * (width + 4), break_long_words=False
        )
    return "keys of CONFIG.yaml, with their defaults:\n" + "\n".join(lines)


def _rows(cls: type[Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    meanings = _field_docstrings(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _rows(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, _default(field), meanings[field.name]


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value is None or value in ({}, ()):
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _field_docstrings(cls: type[Any]) -> dict[str, str]:
    """The string below each field, which Python drops, so it is read from the source; or else what the class's own
    docstring says of the field.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    texts = _documented_attributes(cls)
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            texts[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return texts


def _documented_attributes(cls: type[Any]) -> dict[str, str]:
    """What a Google-style docstring says of each attribute."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    section = section.partition("\n\n")[0]
    entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}
