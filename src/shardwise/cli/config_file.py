"""Reads a training configuration: a YAML file and `key=value` overrides, checked together.

The keys are declared in `train/run_config.py`; pydantic checks types and bounds.
"""

import argparse
import dataclasses
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from shardwise.data.config import Problem, SourceConfig
from shardwise.errors import ConfigError, LoadError, ShardwiseError, as_error, counted, did_you_mean
from shardwise.train.run_config import TrainConfig, check_config

_RUN = TypeAdapter(TrainConfig)
_SOURCE = TypeAdapter(tuple[SourceConfig, ...], config=ConfigDict(use_attribute_docstrings=True))
_GROUPS = {field.name for field in dataclasses.fields(TrainConfig) if field.default is dataclasses.MISSING}


_ELSEWHERE = {
    "optimizer.lr": "learning_rate lr",
    "optimizer.name": "optim optimizer_name optimizer.type",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.max_grad_norm": "max_grad_norm gradient_clipping gradient_clip_val",
    "optimizer.schedule.name": "lr_scheduler lr_scheduler_type scheduler",
    "optimizer.schedule.warmup_steps": "warmup_steps warmup warmup_ratio num_warmup_steps lr_scheduler.warmup_steps",
    "steps": "max_steps num_steps training training.steps total_steps",
    "epochs": "num_epochs num_train_epochs max_epochs",
    "batch_size (rows of a step, over all ranks)": "per_device_train_batch_size train_batch_size micro_batch_size "
    "per_device_eval_batch_size local_batch_size global_batch_size",
    "num_microbatches": "gradient_accumulation_steps accumulate_grad_batches",
    "data.seq_length": "sequence_len max_seq_length max_length max_seq_len seq_len seq_length cutoff_len block_size",
    "data.path or data.sources": "datasets dataset train_file dataset_name dataset_path train_data",
    "data.rows": "packing sample_packing",
    "data.chat_template": "chat_template",
    "data.learn": "train_on_inputs assistant_only_loss completion_only_loss",
    "model.path": "model_name_or_path base_model pretrained_model_name_or_path name_or_path",
    "model.tokenizer": "tokenizer tokenizer_name tokenizer_name_or_path",
    "model.dtype or precision.compute": "bf16 fp16 torch_dtype dtype mixed_precision",
    "recompute.mode": "gradient_checkpointing activation_checkpointing activation_checkpoint",
    "adapter": "lora lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear peft",
    "log.to": "report_to wandb wandb_project mlflow tensorboard",
    "log.every": "logging_steps log_every_n_steps metrics.log_freq",
    "log.dir": "logging_dir run_name",
    "checkpoint.dir and export": "output_dir save_dir default_root_dir",
    "checkpoint.every": "save_steps save_strategy saves_per_epoch save_every checkpoint.interval",
    "checkpoint.keep_last": "save_total_limit checkpoint.keep_latest_k",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "evaluation.path": "eval_file val_set_size test_datasets validation_file",
    "evaluation.every": "eval_steps evals_per_epoch eval_strategy evaluation_strategy val_check_interval",
    "layout": "parallelism tensor_parallel_size tensor_parallel_degree pipeline_parallel_degree fsdp_config deepspeed "
    "data_parallel_shard_degree tp_size dp_size pp_size devices strategy num_nodes",
}
"""Our keys, and those that say the same in transformers, axolotl, torchtitan, Lightning and others."""
_OURS = {theirs: ours for ours, several in _ELSEWHERE.items() for theirs in several.split()}


class Problems(list[Problem]):
    """The problems found so far."""

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Turns a `ShardwiseError` of the block into a problem of `key`."""
        try:
            yield
        except ShardwiseError as error:
            self.append(Problem(key, str(error)))

    def affected(self) -> set[str]:
        """Returns the keys that have a problem."""
        return {problem.key for problem in self}

    def add(self, more: Iterable[Problem]) -> None:
        """Adds the problems of keys that have none yet."""
        keys = self.affected()
        self.extend(problem for problem in more if problem.key not in keys)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `read_config`."""
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the run; `train --help` lists its keys")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds the keys that override those of a run's file."""
    about = "keys that override the file's, such as data.seq_length=256"
    parser.add_argument(
        "overrides", nargs="*", default=None, metavar="key=value", help=about
    )  # else argparse needs one


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Returns the configuration in `path`, changed by `overrides`."""
    config, problems = parse_config(path, overrides)
    if problems:
        raise config_error(str(path), problems)
    return config


def parse_config(path: Path, overrides: Sequence[str] = ()) -> tuple[TrainConfig, list[Problem]]:
    """Like `read_config`, but returns the problems. Such keys have their defaults. Raises only `LoadError`."""
    tree = _read_file(path)
    problems = Problems()
    for override in overrides:
        _apply_override(tree, override, problems)
    config, more = build_config(tree)
    return config, [*problems, *more]


def build_config(tree: Mapping[str, Any]) -> tuple[TrainConfig, list[Problem]]:
    """Returns a configuration from a plain mapping, and its problems."""
    tree = json.loads(json.dumps(tree, default=str))
    problems = Problems()
    while True:  # without the wrong keys, until the rest is right
        try:
            config = _RUN.validate_json(json.dumps(tree), strict=True)
            break
        except ValidationError as error:
            for key, problem in _read_errors(error).items():
                problems.append(problem)
                _leave_out(tree, key)
    # A group with a misspelt key is incomplete, so its other keys may only seem to be missing.
    groups = {key.rpartition(".")[0] for key in problems.affected()}
    problems.add(problem for problem in check_config(config) if problem.key not in groups)
    return config, problems


def _leave_out(tree: Any, key: str) -> None:
    if key in tree:  # a misspelt key may contain a dot
        del tree[key]
    else:
        group, _, rest = key.partition(".")
        _leave_out(tree[group], rest)


def config_error(place: str, problems: Iterable[Problem]) -> ConfigError:
    """Returns one error that names every problem."""
    lines = [str(problem) for problem in problems]
    fix = "`shardwise train --help` lists the keys" if any("unknown key" in line for line in lines) else None
    return ConfigError(f"{place} has {counted(len(lines), 'problem')}", why="\n".join(lines), fix=fix)


def dump_config(config: TrainConfig) -> str:
    """Returns the configuration as YAML with every default; `read_config` reads it back."""
    text: str = yaml.safe_dump(_RUN.dump_python(config, mode="json"), sort_keys=False, allow_unicode=True)
    return text


def flat_config(config: TrainConfig) -> dict[str, Any]:
    """Returns the values of a configuration by their dotted keys; tuples and mappings below a key as text."""
    found: dict[str, Any] = {}

    def walk(group: Mapping[str, Any], prefix: str) -> None:
        for name, value in group.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = value if isinstance(value, int | float | str) else str(value)

    walk(_RUN.dump_python(config, mode="json"), "")
    return found


def config_reference() -> str:
    """Returns the help page of all keys, with their defaults."""
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
    """Yields every group and key by its dotted name, with its JSON schema."""
    schema = _RUN.json_schema()
    inherited = _SOURCE.json_schema()["$defs"]["SourceConfig"]["properties"]  # pydantic reads own docstrings only

    def walk(group: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        # Some groups describe their keys in the "Attributes" section of a Google-style docstring.
        section = group.get("description", "").partition("Attributes:\n")[2].partition("\n\n")[0]
        _, *entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
        described = dict(zip(entries[::2], entries[1::2], strict=True))
        documented = inherited if prefix == "data." else {}
        for name, about in group["properties"].items():
            yield prefix + name, {"description": described.get(name, ""), **documented.get(name, {}), **about}
            if "$ref" in about:
                yield from walk(schema["$defs"][about["$ref"].rpartition("/")[2]], f"{prefix}{name}.")

    return walk(schema, "")


def _read_errors(error: ValidationError) -> dict[str, Problem]:
    """Returns pydantic's errors as problems, by key."""
    keys = dict(_keys())
    problems: dict[str, Problem] = {}
    for detail in error.errors():
        key = ".".join(map(str, detail["loc"]))
        if detail["type"] == "unexpected_keyword_argument":
            group, _, last = key.rpartition(".")
            siblings = [name.rpartition(".")[2] for name in keys if name.rpartition(".")[0] == group]
            elsewhere = [name for name in keys if name.rpartition(".")[2] == last]
            ours = _OURS.get(key) or _OURS.get(last)
            if elsewhere:
                meant = f" (there is {' and '.join(elsewhere)})"
            else:
                meant = f": it is {ours} here" if ours else did_you_mean(last, siblings)
            problems[key] = Problem(key, f"unknown key{meant}")
            continue
        while key not in keys:  # the location continues below the key, into lists and unions
            key = key.rpartition(".")[0]
        own_error = detail.get("ctx", {}).get("error")
        what = str(own_error) if isinstance(own_error, ShardwiseError) else f"{detail['msg']}, not {detail['input']!r}"
        if key in problems:  # of a union: one error for each of its types
            what = f"{problems[key].what}; or: {what}"
        inside = [name.rpartition(".")[2] for name in keys if name.rpartition(".")[0] == key]
        meaning = " ".join(keys[key]["description"].split()).rstrip(".") or f"the keys {', '.join(inside)}"
        problems[key] = Problem(key, what, f"expected: {meaning}")
    return problems


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number, as in YAML 1.2, and a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Returns a mapping. PyYAML would silently drop the first of two equal keys."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))  # no dates
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_file(path: Path) -> dict[str, Any]:
    what, fix = f"cannot read the configuration file {path}", "`shardwise train --help` shows one"
    try:
        with as_error(LoadError, what, OSError, fix=fix):
            text = path.read_text(encoding="utf-8")
        tree: Any = yaml.load(text, _Loader) or {}  # a SafeLoader
        tree = json.loads(json.dumps(tree, default=str))  # aliases share objects, which an override must not change
    except (yaml.YAMLError, ValueError) as error:
        why = str(error).replace('"<unicode string>"', str(path))
        raise LoadError(f"{path} is not YAML", why=why) from error
    if not isinstance(tree, dict):
        raise LoadError(f"{path} does not hold keys and values", fix="a line looks like `layout: tp2`")
    return {
        key: value for key, value in tree.items() if value is not None or key not in _GROUPS
    }  # a group may be empty


def _apply_override(tree: dict[str, Any], override: str, problems: Problems) -> None:
    """Sets the key that `override` names."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        problems.append(Problem(override, "is not an override", "write key=value, such as optimizer.lr=1e-4"))
        return
    *groups, last = key.split(".")
    here: Any = tree
    for group in groups:
        here = here.setdefault(group, {})
        if not isinstance(here, dict):
            problems.append(Problem(key, f"cannot be set, because {group} is {here!r}, not a group of keys"))
            return
    try:
        here[last] = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        problems.append(Problem(key, f"{text!r} is not YAML: {error}", "quote it"))
