"""What `manifest.json` and `tensors.json` hold, with its types: JSON that was edited, or made by something else, is one
error that names the place. The format is in docs/checkpoint-format.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, Strict, TypeAdapter, ValidationError

from shardwise.errors import LoadError
from shardwise.weights.tensor_file import DTYPES

__all__ = ["FileFacts", "Manifest", "Part", "check_index", "check_manifest"]

_DTYPES = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPES)


def _known_dtype(name: str) -> str:
    if name not in _DTYPES:
        raise ValueError("no dtype of safetensors files")
    return name


_Text = Annotated[str, Strict()]
_Count = Annotated[int, Strict(), Field(ge=0, lt=2**62)]
_Crc = Annotated[int, Strict(), Field(ge=0, lt=2**32)]
_Number = Annotated[float, Strict()]
_Dtype = Annotated[_Text, AfterValidator(_known_dtype)]


class FileFacts(NamedTuple):
    """A file of the checkpoint: its size, and the CRC-32 of all of it, of a tensor file only of its header."""

    num_bytes: _Count
    crc: _Crc


class Part(NamedTuple):
    """Elements `box` of a tensor, and where they are: the file's number, and the CRC-32 of their bytes."""

    file: _Count
    crc: _Crc
    box: tuple[tuple[_Count, _Count], ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What makes a directory a checkpoint.

    Attributes:
        number: counts the checkpoints of a directory: the newest has the largest.
        tag: the directory's name.
        step: as `extra` says it, None where it does not.
        content: "all", or "trained" where the frozen parameters are left out.
        layout: of the ranks that wrote it, as text.
        model: the class's name.
        time: when it was begun, in seconds of the clock.
        versions: of the libraries that wrote it.
        files: every other file of the directory.
    """

    number: _Count
    tag: _Text
    step: _Count | None
    content: Literal["all", "trained"]
    layout: _Text
    model: _Text
    time: _Number
    versions: dict[_Text, _Text]
    files: dict[_Text, FileFacts]


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    dtype: _Dtype
    shape: tuple[_Count, ...]
    layout: _Count
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class _Scalar:
    scalar: _Number | dict[_Text, Any]
    dtype: _Dtype


@dataclass(frozen=True, kw_only=True)
class _Value:
    value: Any


@dataclass(frozen=True, kw_only=True)
class _Like:
    like: _Dtype


@dataclass(frozen=True, kw_only=True)
class _Whole:
    whole: _Dtype
    shape: list[_Count]


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    ranks: _Dtype
    shape: list[_Count]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    group: _Count
    states: dict[_Text, _Like | _Scalar | _Value | _Whole | _Ranks]


@dataclass(frozen=True, kw_only=True)
class _Optimizer:
    class_name: Annotated[_Text, Field(alias="class")]
    groups: list[dict[_Text, Any]]
    parameters: dict[_Text, _Parameter]


@dataclass(frozen=True, kw_only=True)
class _LossScale:
    value: _Number
    good_steps: _Count


@dataclass(frozen=True, kw_only=True)
class _Values:
    scheduler_class: _Text = ""
    loss_scale: _LossScale | None = None
    random: dict[_Text, _Count] = field(default_factory=dict)
    base: dict[_Text, _Text] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Index:
    files: list[_Text]
    tensors: dict[_Text, _Tensor]
    layouts: list[Any]
    tied: dict[_Text, _Text]
    optimizer: _Optimizer | None
    values: _Values


def check_manifest(data: Any, path: Path) -> Manifest:
    """The manifest that `data` is; raises `LoadError` where it is none."""
    manifest: Manifest = _check(Manifest, data, "the manifest is incomplete", path)
    return manifest


def check_index(data: Any, path: Path) -> dict[str, _Tensor]:
    """The tensors that an index lists; raises `LoadError` where `data` is none, or lacks a state's group or tensor."""
    index: _Index = _check(_Index, data, f"{path.name} says what cannot be", path)
    optimizer = data["optimizer"]
    for name, each in (optimizer["parameters"] if optimizer is not None else {}).items():
        if each["group"] >= len(optimizer["groups"]):
            why = f"{name} is in group {each['group']} of {len(optimizer['groups'])}"
            raise LoadError(f"{path.name} says what cannot be", at=str(path), why=why)
        keys = [
            f"optimizer/{name}/{state}" for state, facts in each["states"].items() if {"like", "whole"} & facts.keys()
        ]
        if lost := [key for key in keys if key not in data["tensors"]]:
            raise LoadError(f"the checkpoint has no {lost[0]}", at=str(path))
    return index.tensors


@functools.cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def _check(form: Any, data: Any, summary: str, path: Path) -> Any:
    try:
        return _adapter(form).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise LoadError(summary, at=str(path), why=f"{place}: {first['msg']}: {first['input']!r:.100}") from error
