"""The task of a run: its model class, its labels, and what turns records into examples."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from shardwise.checkpoint.store import find_tag
from shardwise.cli.data import read_records, tokenizer_digest
from shardwise.cli.run_checkpoints import find_newest
from shardwise.data.config import SourceConfig, WeightedSource, sources_of
from shardwise.data.corpus import Record, digest
from shardwise.data.tables import is_table
from shardwise.data.tasks import TASKS, ExampleRows, Task, Tools, find_label
from shardwise.errors import ConfigError, LoadError, UnsupportedError, counted, one_line
from shardwise.parallel.build import model_class_of, read_config
from shardwise.train.run_config import ModelConfig, TrainConfig

_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".wav")


def find_task(config: TrainConfig) -> str:
    """Returns the name of the run's task: `model.task`, or that of the class that the checkpoint names.

    Raises:
        UnsupportedError: that class is for none of the tasks.
    """
    if config.model.task is not None:
        return config.model.task
    if config.model.allow_missing:  # a head that is trained on a body
        return "causal-lm"
    model_config = read_config(config.model.path or config.model.config or {}, {})[0]
    chosen = model_class_of(model_config)
    for name, task in TASKS.items():
        known = task.auto_class._model_mapping.get(type(model_config), ())
        if chosen is task.auto_class or chosen in (known if isinstance(known, tuple) else (known,)):
            return name
    raise UnsupportedError(
        f"a model of type {model_config.model_type!r}",
        why=f"shardwise train knows no task of a {chosen.__name__}",
        fix=f"set model.task to one of {', '.join(TASKS)}, or train it in Python, with shardwise.TrainStep",
    )


def class_of(config: TrainConfig | None, task: str | None = None) -> Any:
    """Returns the `auto_class` argument of `load`: the class of `task`, else of the run's task. Without one the model
    names it, or with `model.allow_missing` a causal head is trained on a body.
    """
    model = ModelConfig() if config is None else config.model
    chosen = task or model.task or ("causal-lm" if model.allow_missing else None)
    return None if chosen is None else TASKS[chosen].auto_class


def adapter_options(config: TrainConfig) -> dict[str, Any]:
    """Returns PEFT's `task_type` of the run's task; where it has none, the head as modules that are trained whole."""
    name = find_task(config)
    task = TASKS[name]
    kind: dict[str, Any] = {"task_type": task.adapter_type} if task.adapter_type else {}
    if name == "causal-lm" or (kind and config.model.task is None):
        return kind
    model_config = read_config(config.model.path or config.model.config or {}, {})[0]
    model = _meta_model(task.auto_class, model_config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = [each for each in _head_of(model, model_config) if each not in tied and each not in tied.values()]
    poolers = {name[: name.index("pooler") + len("pooler")] for name in names if ".pooler." in name}
    heads = {name.partition(".")[0] for name in names if ".pooler." not in name and "." in name}
    chosen = sorted(poolers | heads) or None
    if (
        chosen is not None and (config.adapter or {}).get("target_modules") == "all-linear"
    ):  # PEFT would take the head too
        linears = [each for each, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        kind["target_modules"] = [
            each for each in linears if not f"{each}.".startswith(tuple(f"{head}." for head in chosen))
        ]
    return {**kind, "modules_to_save": chosen}


def _head_of(model: Any, model_config: Any) -> list[str]:
    """Returns the names of the parameters that the body alone does not have, and of its pooler, which only some heads
    have; nothing where no body is known.
    """
    if type(model_config) not in transformers.AutoModel._model_mapping:
        return []
    body = {name for name, _ in _meta_model(transformers.AutoModel, model_config).named_parameters()}
    prefix = f"{model.base_model_prefix}."
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if name.removeprefix(prefix) not in body or ".pooler." in name]


def _meta_model(auto_class: Any, model_config: Any) -> Any:
    with torch.device("meta"):
        return auto_class.from_config(copy.deepcopy(model_config))


def load_options(config: TrainConfig, model_config: Any) -> dict[str, Any]:
    """Returns the options of `load` for a new head: what is outside of the body may be missing or of other shapes."""
    if config.model.task is None or config.model.path is None:
        return {}
    if type(model_config) not in class_of(config)._model_mapping:
        return {}
    head = _head_of(_meta_model(class_of(config), model_config), model_config)
    return {"allow_missing": head, "ignore_mismatched_sizes": head}


def open_tools(config: TrainConfig, model_config: Any, tokenizer: Any) -> tuple[Tools, Any]:
    """Returns what turns the run's records into examples, and the model's config with the labels of the data."""
    name = find_task(config)
    task = TASKS[name]
    places = [place for place in (config.model.tokenizer, config.model.path) if place is not None]
    images = _load(transformers.AutoImageProcessor, places) if "images" in task.needs else None
    audio = _load(transformers.AutoFeatureExtractor, places) if "audio" in task.needs else None
    processor = _load(transformers.AutoProcessor, places) if "processor" in task.needs else None
    made = [each.to_dict() for each in (images, audio, processor) if each is not None]
    tools = Tools(
        tokenizer=tokenizer,
        images=images,
        audio=audio,
        processor=processor,
        seq_length=min(config.data.seq_length, getattr(model_config, "max_target_positions", None) or 2**30),
        dtype=getattr(torch, config.model.dtype),
        fingerprint=digest(made, "" if tokenizer is None else tokenizer_digest(tokenizer)),
        start_token=getattr(model_config, "decoder_start_token_id", None) if "audio" in task.needs else None,
    )
    if tools.processor is not None and config.data.chat_template is not None:
        tools.processor.chat_template = tokenizer.chat_template
    if task.metrics == "frames":
        _set_blank(config, model_config, tokenizer)
    if task.metrics != "classes":
        return tools, model_config
    labels, is_numbered = _find_labels(config, task, model_config)
    size = max(1, len(labels))
    if config.model.path is not None and config.model.task is None and model_config.num_labels != size:
        raise ConfigError(
            f"the data has {counted(size, 'label')}, and the model's head {model_config.num_labels}",
            why=f"the labels are {', '.join(labels[:12]) or 'numbers'}",
            fix=f"set model.task: {name} to train a new head",
        )
    _set_labels(model_config, labels)
    return replace(tools, labels=labels, is_numbered=is_numbered), model_config


def _set_blank(config: TrainConfig, model_config: Any, tokenizer: Any) -> None:
    """Makes the tokenizer's padding the blank of a new head; raises `ConfigError` if a trained one has another."""
    if config.model.task is not None:
        model_config.vocab_size, model_config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    elif model_config.pad_token_id != tokenizer.pad_token_id:
        raise ConfigError(
            f"the model's blank is {model_config.pad_token_id}, and the tokenizer's padding {tokenizer.pad_token_id}",
            why="CTC takes the config's pad_token_id for its blank",
            fix="use the model's own tokenizer, or set model.task: ctc to train a new head",
        )


def _set_labels(model_config: Any, labels: Sequence[str]) -> None:
    model_config.id2label = dict(enumerate(labels)) if labels else {0: "LABEL_0"}
    model_config.label2id = {label: number for number, label in model_config.id2label.items()}
    model_config.problem_type = "single_label_classification" if labels else "regression"


def _saved_labels(config: TrainConfig) -> dict[str, str]:
    """Returns id2label of the run's newest checkpoint; empty if there is none."""
    directory = find_newest(config.checkpoint)
    if directory is None:
        return {}
    path = find_tag(directory, None) / "config.json"
    return dict(json.loads(path.read_text(encoding="utf-8")).get("id2label") or {}) if path.is_file() else {}


def _find_labels(config: TrainConfig, task: Task, model_config: Any) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the classes by index, and whether the data has their numbers.

    They are the model's own, or those of the run's checkpoint, where these have what the data says, else the data's.
    Numbers that are not all whole are no classes, and those for a head of one number.
    """
    column, found = task.columns[-1], set()
    for source in sources_of(config.data):
        for record in read_task_records(source, task)[0]:
            value = record.value(column)
            if value == "":
                raise LoadError("the label is empty", at=record.place, fix="leave the record out")
            found.update(value if isinstance(value, list) else [value])
    texts = {str(value) for value in found}
    saved = {int(number): name for number, name in _saved_labels(config).items()}
    own = tuple(str(name) for _, name in sorted((saved or model_config.id2label or {}).items()))
    if all(find_label(own, text) is not None for text in texts):
        return own, False
    if all(_is_number(text) for text in texts):
        is_whole = all(text.isdecimal() for text in texts)
        if column == "label" and (not is_whole or (config.model.task is None and len(own) == 1)):
            return (), False
        if not is_whole:
            raise LoadError(f"labels such as {min(texts)} are no classes", fix="number classes from 0, or name them")
        most = max(map(int, texts))
        return (own if most < len(own) else tuple(f"LABEL_{number}" for number in range(most + 1))), True
    if saved or (config.model.path is not None and config.model.task is None and not own[0].startswith("LABEL_")):
        raise ConfigError(
            f"the data's labels are {', '.join(sorted(texts)[:12])}, and the model's {', '.join(own[:12])}",
            fix="write the model's labels or their numbers, or train a new head "
            + ("in another checkpoint.dir" if saved else "with model.task"),
        )
    return tuple(sorted(texts)), False


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def read_task_records(source: SourceConfig, task: Task) -> tuple[list[Record], str]:
    """Returns the records of a source, and their fingerprint. A directory of images or sound without a table has one
    below it for each label.
    """
    path = Path(source.path) if source.path is not None else None
    medium = next((column for column in task.columns if column in ("image", "audio")), None)
    if path is not None and path.is_dir() and medium is not None and source.include is None:
        has_table = any(is_table(file) and file.suffix != ".json" for file in path.rglob("*"))
        found = [] if has_table else sorted(file for file in path.glob("*/*") if file.suffix.lower() in _MEDIA)
        files = [file for file in found if not (file.name.startswith(".") or file.parent.name.startswith("."))]
        if files:
            names = [(str(file.relative_to(path)), file.stat().st_size) for file in files]
            values = [{medium: name, task.columns[-1]: Path(name).parts[0]} for name, _ in names]
            records = [Record(str(file), each, directory=path) for file, each in zip(files, values, strict=True)]
            return records, digest(names)
    return read_records(source)


def example_rows(sources: Sequence[SourceConfig], task: Task, tools: Tools) -> ExampleRows:
    """Returns the rows of sources, each in a fixed random order; those with weight 2 are there twice."""
    records: list[Record] = []
    fingerprints = []
    for source in sources:
        own, fingerprint = read_task_records(source, task)
        weight = source.weight if isinstance(source, WeightedSource) else 1.0
        order = np.random.default_rng(0).permutation(len(own)).tolist()  # the files of a class follow each other
        records += [own[order[number % len(own)]] for number in range(max(1, round(weight * len(own))))]
        fingerprints.append((fingerprint, weight, source.columns))
    if task.metrics == "classes":  # a label that the model does not know would end the run when its row comes
        for record in records:
            value = record.value(task.columns[-1])
            for label in value if isinstance(value, list) else [value]:
                tools.label(record, label)
    padding = getattr(tools.tokenizer, "pad_token_id", None)
    paddings = {"input_ids": 0 if padding is None else padding}
    assert task.encode is not None, "text is kept in documents"
    return ExampleRows(records, task.encode, tools, fingerprint=repr(fingerprints), paddings=paddings)


def _load(auto_class: Any, places: Sequence[str]) -> Any:
    """Returns a processor from the first place that has one."""
    errors = []
    for place in places:
        try:
            return auto_class.from_pretrained(place)
        except Exception as error:  # noqa: BLE001 - a damaged file raises errors of many kinds
            errors.append(error)
    raise ConfigError(
        f"{auto_class.__name__} cannot load from {' or '.join(map(repr, places))}",
        why="\n".join(map(one_line, errors)),
        fix="put the model's preprocessor_config.json there, or name another place with model.tokenizer",
    )
