"""Reading a training configuration: YAML file, `key=value` overrides, types and spelling, all problems at once."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from shardwise.errors import ConfigError, LoadError, did_you_mean
from shardwise.train.config import Problem, TrainConfig, check_config

__all__ = ["build_config", "config_error", "dump_config", "parse_config", "read_config"]

KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in `path` with `overrides` laid over it.

    Raises:
        LoadError: there is no such file, or it is not YAML.
        ConfigError: keys or values are wrong; names every one of them.
    """
    config, problems = parse_config(path, overrides)
    if problems:
        raise config_error(str(path), problems)
    return config


def parse_config(path: Path, overrides: Sequence[str] = ()) -> tuple[TrainConfig, list[Problem]]:
    """Like `read_config`, but hands the problems back; what had one stands at its default. Raises `LoadError` only."""
    tree = _read_yaml(path)
    problems = [problem for override in overrides for problem in _apply_override(tree, override)]
    config, found = build_config(tree)
    return config, problems + found


def build_config(tree: Mapping[str, Any]) -> tuple[TrainConfig, list[Problem]]:
    """A configuration from a plain mapping, and everything wrong with it."""
    problems: list[Problem] = []
    config: TrainConfig = _build(TrainConfig, tree, "", problems)
    # A group with a misspelt key is incomplete: what else seems to be missing there would only mislead.
    broken = {problem.key for problem in problems} | {problem.key.rpartition(".")[0] for problem in problems}
    return config, problems + [problem for problem in check_config(config) if problem.key not in broken]


def config_error(place: str, problems: Iterable[Problem]) -> ConfigError:
    """One error that names every problem."""
    lines = [str(problem) for problem in problems]
    count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
    fix = "`shardwise train --help` lists the keys" if any("unknown key" in line for line in lines) else None
    return ConfigError(f"{place} has {count}", why="\n".join(lines), fix=fix)


def dump_config(config: TrainConfig) -> str:
    """The configuration as YAML, every default spelled out; `read_config` reads it back."""
    text: str = yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)
    return text


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML loses the first of two equal keys without a word; this one refuses them."""


def _construct_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            mark = node.value[position][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands there twice", mark)
    return dict(loader.construct_mapping(node, deep=True))


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise LoadError(
            f"there is no configuration file {path}{did_you_mean(path.name, beside)}",
            fix="`shardwise train --help` shows a small one",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read the configuration file {path}", why=str(error)) from error
    try:
        tree = yaml.load(text, _StrictLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise LoadError(f"{path} is not YAML", why=str(error)) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise LoadError(f"{path} holds {_kind(tree)}, not keys and values", fix="a line looks like `layout: tp2`")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> list[Problem]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        return [Problem(override, "is no override", "write key=value, such as optimizer.lr=1e-4")]
    try:
        value = yaml.load(text, _StrictLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        return [Problem(key, f"{text!r} is not YAML: {error}", "quote it")]
    *groups, last = key.split(".")
    here = tree
    for group in groups:
        inner = here.get(group)
        if inner is None:
            inner = here[group] = {}
        if not isinstance(inner, dict):
            return [Problem(key, f"cannot be set: {group} is {_kind(inner)}, not a group of keys")]
        here = inner
    here[last] = value
    return []


def _build(cls: type[Any], tree: Mapping[str, Any], prefix: str, problems: list[Problem]) -> Any:
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in hints:
            close = did_you_mean(str(key), hints) or _elsewhere(str(key))
            problems.append(Problem(name, f"unknown key{close}"))
            continue
        converted = _convert(value, hints[key], name, problems)
        if converted is not _WRONG:
            values[key] = converted
    try:
        return cls(**values)
    except ConfigError as error:  # an option that checks itself
        why = f" ({error.why})" if error.why else ""
        problems.append(Problem(prefix.rstrip("."), error.summary + why, error.fix or ""))
        return cls()


def _elsewhere(key: str) -> str:
    """Points to a key of this very name in another group, the likeliest mistake after a misspelling."""
    places = [name for name in _all_keys(TrainConfig) if name.split(".")[-1] == key]
    return f" (did you mean {places[0]!r}?)" if places else ""


def _all_keys(cls: type[Any], prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(cls).items():
        is_group = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        keys += _all_keys(hint, f"{prefix}{name}.") if is_group else [prefix + name]
    return keys


_WRONG = object()


def _convert(value: Any, hint: Any, name: str, problems: list[Problem]) -> Any:
    """`value` as `hint` wants it, or `_WRONG` with the problem noted."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if value is None:
            return hint()
        if isinstance(value, Mapping):
            return _build(hint, value, f"{name}.", problems)
        problems.append(Problem(name, f"is {_kind(value)}, expected a group of keys"))
        return _WRONG
    for option in _options(hint):
        converted = _convert_plain(value, option)
        if converted is not _WRONG:
            return converted
    wanted = " or ".join(_describe(option) for option in _options(hint))
    close = did_you_mean(str(value), _choices(hint))
    problems.append(Problem(name, f"is {_kind(value)}, expected {wanted}{close}"))
    return _WRONG


def _convert_plain(value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value if isinstance(value, str) and value in arguments else _WRONG
    if origin is tuple:
        items = [_convert_plain(item, arguments[0]) for item in value] if isinstance(value, list) else [_WRONG]
        return _WRONG if _WRONG in items else tuple(items)
    if origin is dict:
        is_fit = isinstance(value, Mapping) and all(
            isinstance(key, str) and _convert_plain(item, arguments[1]) is not _WRONG for key, item in value.items()
        )
        return dict(value) if is_fit else _WRONG
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        # YAML 1.1 reads 3e-4, without a dot, as text.
        try:
            return float(value)
        except ValueError:
            return _WRONG
    return value if hint is Any or type(value) is hint else _WRONG


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> list[str]:
    options = [option for option in _options(hint) if typing.get_origin(option) is Literal]
    return [choice for option in options for choice in typing.get_args(option)]


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(arguments)
    if origin is tuple:
        return "a list of text"
    if origin is dict:
        return "keys and text values" if arguments[1] is str else "keys and values"
    return KINDS[hint]


def _kind(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "a group of keys" if isinstance(value, Mapping) else f"the list {value!r}"
    return "null" if value is None else f"{'the text ' if isinstance(value, str) else ''}{value!r}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
