"""Modules that FSDP2 gathers one by one, by their classes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.compat.import_paths import import_classes
from shardwise.errors import ConfigError
from shardwise.plan.options import check_kind

__all__ = ["unit_names"]


def unit_names(model: nn.Module, paths: Sequence[str] | None, what: str) -> tuple[str, ...]:
    """The names of the modules that are instances of the classes at `paths`, of which there may be none.

    Raises:
        ConfigError: a path leads to no class, or no module is an instance of one.
    """
    check_kind("the model", model, nn.Module, fix="pass the model itself, first")
    classes = tuple(import_classes([] if paths is None else paths))
    names = {name: type(module) for name, module in model.named_modules() if name and isinstance(module, classes)}
    missing = [
        path
        for path, cls in zip(paths or [], classes, strict=True)
        if not any(map(cls.__subclasscheck__, names.values()))
    ]
    if missing:
        raise ConfigError(
            f"{what}: no module of {type(model).__name__} is a {' or a '.join(missing)}",
            fix=f"use classes of its layers, such as {_layer_class(model)}",
        )
    return tuple(names)


def _layer_class(model: nn.Module) -> str:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    layer = type(lists[0][0]) if lists else type(next(model.children(), model))
    return f"{layer.__module__}.{layer.__qualname__}"
