"""Reading a training configuration: YAML file, `key=value` overrides, types and spelling, all problems at once.

Keys are declared in `train/run_config.py`; pydantic holds values against their types and bounds.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from shardwise.errors import ConfigError, LoadError, ShardwiseError, counted, did_you_mean
from shardwise.train.run_config import Problem, TrainConfig, check_config

__all__ = [
    "Problems",
    "build_config",
    "config_error",
    "config_reference",
    "dump_config",
    "parse_config",
    "read_config",
]

_RUN = TypeAdapter(TrainConfig)
_OTHER_NAMES = {
    **dict.fromkeys(("name", "id", "name_or_path", "repo_id", "checkpoint"), "path"),
    **dict.fromkeys(("max_length", "max_seq_length", "block_size"), "seq_length"),
    **dict.fromkeys(("directory", "output_dir", "logging_dir"), "dir"),
    **dict.fromkeys(("max_steps", "num_steps"), "steps"),
    "learning_rate": "lr",
}
"""What other programs call a key, and its name here."""


class Problems(list[Problem]):
    """What has been found so far."""

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Takes the error of the block as a problem of `key`."""
        try:
            yield
        except ShardwiseError as error:
            self.append(Problem(key, str(error)))


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
    """Like `read_config`, but returns the problems; what had one has its default. Raises `LoadError` only."""
    tree = _read_file(path)
    problems = [problem for override in overrides for problem in _apply_override(tree, override)]
    config, more = build_config(tree)
    return config, problems + more


def build_config(tree: Mapping[str, Any]) -> tuple[TrainConfig, list[Problem]]:
    """A configuration from a plain mapping, and everything wrong with it."""
    tree = json.loads(json.dumps(tree, default=str))
    problems: dict[str, Problem] = {}
    while True:  # without what was wrong, until the rest is right
        try:
            config = _RUN.validate_json(json.dumps(tree), strict=True)
            break
        except ValidationError as error:
            for key, problem in _read_errors(error).items():
                _leave_out(tree, key)
                if problem is not None:
                    problems[key] = problem
    # A group with a misspelt key is incomplete: what else seems to be missing there would only mislead.
    broken = {*problems, *(key.rpartition(".")[0] for key in problems)}
    return config, [*problems.values(), *(problem for problem in check_config(config) if problem.key not in broken)]


def _leave_out(tree: Any, key: str) -> None:
    group, _, rest = key.partition(".")
    if key in tree:  # with a point, a misspelt one
        del tree[key]
    else:
        _leave_out(tree[group], rest)


def config_error(place: str, problems: Iterable[Problem]) -> ConfigError:
    """One error that names every problem."""
    lines = [str(problem) for problem in problems]
    count = "a problem" if len(lines) == 1 else counted(len(lines), "problem")
    fix = "`shardwise train --help` lists the keys" if any("unknown key" in line for line in lines) else None
    return ConfigError(f"{place} has {count}", why="\n".join(lines), fix=fix)


def dump_config(config: TrainConfig) -> str:
    """The configuration as YAML, every default spelled out; `read_config` reads it back."""
    text: str = yaml.safe_dump(_RUN.dump_python(config, mode="json"), sort_keys=False, allow_unicode=True)
    return text


def config_reference() -> str:
    """Every key with its default and what it means, as a page of help."""
    rows = {key: about for key, about in _keys() if "$ref" not in about}
    width = max(map(len, rows))
    lines = ["keys of CONFIG.yaml, with their defaults:"]
    for key, about in rows.items():
        text, default = " ".join(about["description"].split()), about.get("default")
        choices = next((kind["enum"] for kind in (about, *about.get("anyOf", ())) if "enum" in kind), ())
        text += f" One of {', '.join(map(str, choices))}." if choices else ""
        if default not in (None, []):
            text += f" [{' '.join(default) if isinstance(default, list) else yaml.safe_dump(default).split()[0]}]"
        first, following = f"  {key:<{width}}  ", " " * (width + 4)
        lines += textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=following, break_long_words=False)
    return "\n".join(lines)


def _keys() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every group and key by its dotted name, with what the JSON schema says of it."""
    schema = _RUN.json_schema()

    def walk(group: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        # What a Google-style docstring says of each attribute, where there is no docstring below it.
        section = group.get("description", "").partition("Attributes:\n")[2].partition("\n\n")[0]
        _, *entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
        described = dict(zip(entries[::2], entries[1::2], strict=True))
        for name, about in group["properties"].items():
            yield prefix + name, {"description": described.get(name, ""), **about}
            if "$ref" in about:
                yield from walk(schema["$defs"][about["$ref"].rpartition("/")[2]], f"{prefix}{name}.")

    return walk(schema, "")


def _read_errors(error: ValidationError) -> dict[str, Problem | None]:
    """What is wrong by key, None where nothing is: a group of which the file has but the name."""
    keys = dict(_keys())
    problems: dict[str, Problem | None] = {}
    for detail in error.errors():
        place = [str(part) for part in detail["loc"]]
        if detail["type"] == "unexpected_keyword_argument":
            key = ".".join(place)
            group, _, rest = place[-1].partition(".")
            is_nested = bool(rest) and key in keys
            meant = f"; in a file write {group}: {{{rest}: …}}" if is_nested else _similar(key, keys)
            problems[key] = Problem(key, f"unknown key{meant}")
            continue
        # A place goes on below its key: into lists, and along the types that a value might have.
        key = next(name for end in range(len(place), 0, -1) if (name := ".".join(place[:end])) in keys)
        context = detail.get("ctx", {})
        if isinstance(context.get("error"), ShardwiseError):
            problems[key] = Problem(key, str(context["error"]))  # a value that checks itself
        elif detail["type"] == "dataclass_type" and detail["input"] is None:
            problems[key] = None
        elif (earlier := problems.get(key)) is not None:
            problems[key] = Problem(key, f"{detail['msg']}; or: {earlier.what}", earlier.fix)
        else:
            close = did_you_mean(str(detail["input"]), re.findall(r"'(\w+)'", str(context.get("expected"))))
            meaning = " ".join(keys[key]["description"].split()).rstrip(".")
            problems[key] = Problem(
                key, f"{detail['msg']}, not {_kind(detail['input'])}{close}", f"expected: {meaning}"
            )
    return problems


def _similar(key: str, keys: Iterable[str]) -> str:
    """Points to a key of the same group, or else to the one of this very name below it or anywhere."""
    group, _, last = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in keys if name.rpartition(".")[0] == group]
    if (ours := _OTHER_NAMES.get(last)) in siblings:
        return f" (did you mean {ours!r}?)"
    if meant := did_you_mean(last, siblings):
        return meant
    alike = [name for name in keys if f".{name}".endswith(f".{last}")]
    candidates = [name for name in alike if name.startswith(group)] or (alike if len(alike) == 1 else [])
    return f" (did you mean {candidates[0]!r}?)" if candidates else ""


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number, as in YAML 1.2, and in which a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """A mapping. YAML would silently lose the first of two equal keys."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                problem = f"the key {key!r} stands there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))  # no dates
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tree: Any = yaml.load(path.read_text(encoding="utf-8-sig"), _Loader) or {}  # a SafeLoader
        tree = json.loads(json.dumps(tree, default=str))  # an override of an alias changes no other
    except FileNotFoundError as error:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise LoadError(
            f"there is no configuration file {path}{did_you_mean(path.name, siblings)}",
            fix="`shardwise train --help` shows a small one",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        fix = "save it as UTF-8 text" if isinstance(error, UnicodeDecodeError) else "pass a YAML file"
        raise LoadError(f"cannot read the configuration file {path}", why=str(error), fix=fix) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: an integer of 5,000 digits
        raise LoadError(f"{path} is not YAML", why=str(error)) from error
    if not isinstance(tree, dict):
        raise LoadError(f"{path} holds {_kind(tree)}, not keys and values", fix="a line looks like `layout: tp2`")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> list[Problem]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        return [Problem(override, "is no override", "write key=value, such as optimizer.lr=1e-4")]
    *groups, last = key.split(".")
    here = tree
    for group in groups:
        if here.get(group) is None:
            here[group] = {}
        if not isinstance(here[group], dict):
            return [Problem(key, f"cannot be set: {group} is {_kind(here[group])}, not a group of keys")]
        here = here[group]
    try:
        here[last] = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        return [Problem(key, f"{text!r} is not YAML: {error}", "quote it")]
    return []


def _kind(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "a group of keys" if isinstance(value, Mapping) else f"the list {value!r}"
    return "null" if value is None else f"{'the text ' if isinstance(value, str) else ''}{value!r}"
