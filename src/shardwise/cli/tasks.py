"""The task of a run: its model class, its labels, and what turns records into examples."""

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
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
from shardwise.errors import ConfigError, LoadError, UnsupportedError, counted, did_you_mean, one_line
from shardwise.parallel.build import model_class_of, read_config
from shardwise.train.run_config import ModelConfig, TrainConfig

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_MOST_CLASSES = 100_000
_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".wav")
_OTHER_SOUND = (".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".wma", ".aif", ".aiff")


def find_task(config: TrainConfig) -> str:
    """Returns the name of the run's task: `model.task`, or that of the class that the checkpoint names.

    Raises:
        UnsupportedError: that class is for none of the tasks.
    """
    if config.model.task is not None:
        return config.model.task
    if config.model.allow_missing:  # a head that is trained on a body
        return "causal-lm"
    model_config = read_model_config(config, None)
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


def read_model_config(config: TrainConfig, tokenizer: Any) -> Any:
    """Returns the model's transformers config. A new model gets the tokenizer's vocabulary size and special tokens."""
    source = config.model.path or config.model.config or {}
    if isinstance(source, dict) and tokenizer is not None:
        source = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in _SPECIAL}, **source}
    return read_config(source, {})[0]


def adapter_options(config: TrainConfig) -> dict[str, Any]:
    """Returns PEFT's `task_type` of the run's task; where it has none, the head as modules that are trained whole."""
    name = find_task(config)
    task = TASKS[name]
    kind: dict[str, Any] = {"task_type": task.adapter_type} if task.adapter_type else {}
    if name == "causal-lm" or (kind and config.model.task is None):
        return kind
    model_config = read_model_config(config, None)
    model = _meta_model(task.auto_class, model_config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = [each for each in _head_of(model, model_config) if each not in tied and each not in tied.values()]
    poolers = {f"{before}.pooler" for before, pooler, _ in (each.partition(".pooler.") for each in names) if pooler}
    heads = {each.partition(".")[0] for each in names if ".pooler." not in each and "." in each}
    chosen = sorted(poolers | heads) or None
    if chosen is not None and (config.adapter or {}).get("target_modules") == "all-linear":
        linears = [each for each, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        of_heads = tuple(f"{head}." for head in chosen)  # which PEFT would adapt too
        kind["target_modules"] = [each for each in linears if not f"{each}.".startswith(of_heads)]
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


def new_head(config: TrainConfig, model_config: Any) -> list[str]:
    """Returns the parameters of a new head: what is outside of the body may be missing or of other shapes."""
    if config.model.task is None or config.model.path is None:
        return []
    auto_class = class_of(config)
    is_known = type(model_config) in auto_class._model_mapping
    return _head_of(_meta_model(auto_class, model_config), model_config) if is_known else []


def open_tools(config: TrainConfig, model_config: Any, tokenizer: Any) -> tuple[Tools, Any]:
    """Returns what turns the run's records into examples, and the model's config with the labels of the data."""
    name = find_task(config)
    task = TASKS[name]
    places = [place for place in (config.model.tokenizer, config.model.path) if place is not None]
    classes = {
        "images": transformers.AutoImageProcessor,
        "audio": transformers.AutoFeatureExtractor,
        "processor": transformers.AutoProcessor,
    }
    made = {need: _load(classes[need], places) for need in task.needs if need in classes}
    settings = [each.to_dict() for each in made.values()]
    tools = Tools(
        tokenizer=tokenizer,
        **made,
        seq_length=min(config.data.seq_length, getattr(model_config, "max_target_positions", None) or 2**30),
        dtype=getattr(torch, config.model.dtype),
        fingerprint=digest(settings, "" if tokenizer is None else tokenizer_digest(tokenizer)),
        start_token=getattr(model_config, "decoder_start_token_id", None) if "audio" in made else None,
    )
    if tools.processor is not None and config.data.chat_template is not None:
        tools.processor.chat_template = tokenizer.chat_template
    if task.metrics == "classes" and tokenizer is not None:  # a decoder looks for the padding in its input
        if tokenizer.pad_token_id is None:
            raise ConfigError(
                "the tokenizer has no padding token",
                why="texts of a batch are filled up with it",
                fix="set one and save it: tokenizer.pad_token = tokenizer.eos_token; tokenizer.save_pretrained(...)",
            )
        model_config.pad_token_id = tokenizer.pad_token_id
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


def _labels_of(record: Record, task: Task) -> list[Any]:
    value = record.value(task.columns[-1])
    if value == "":
        raise LoadError("the label is empty", at=record.place, fix="leave the record out")
    return value if isinstance(value, list) else [value]


def _find_labels(config: TrainConfig, task: Task, model_config: Any) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the classes by index, and whether the data has their numbers.

    They are the model's own, or those of the run's checkpoint, where these have what the data says, else the data's.
    Numbers that are not all whole are no classes, and those for a head of one number.
    """
    records = (record for source in sources_of(config.data) for record in read_task_records(source, task)[0])
    texts = {str(label) for record in records for label in _labels_of(record, task)}
    if not texts:
        raise LoadError("no record has a label", at="data")
    directory = find_newest(config.checkpoint)
    saved = None if directory is None else read_config(find_tag(directory, None) / "config.json", {})[0]
    named = saved or model_config
    own = tuple(str(name) for _, name in sorted(named.id2label.items()))
    if all(find_label(own, text) is not None for text in texts):
        return own, False
    is_new, is_whole = config.model.task is not None, all(text.isdecimal() for text in texts)
    if all(_is_number(text) for text in texts):
        is_amount = task.columns[-1] == "label" and (not is_whole or (not is_new and len(own) == 1))
        wrong = [
            text
            for text in sorted(texts)
            if not (math.isfinite(float(text)) if is_amount else text.isdecimal() and int(text) < _MOST_CLASSES)
        ]
        if wrong:
            what = f"labels such as {wrong[0]} are no {'numbers' if is_amount else 'classes'}"
            raise LoadError(what, fix="number classes from 0, or name them")
        if is_amount:
            return (), False
        number = max(len(own), *(int(text) + 1 for text in texts))
        keeps = number == len(own) and not any(name.isdecimal() for name in own)  # else a run could not resume
        return (own if keeps else tuple(f"LABEL_{place}" for place in range(number))), True
    if saved or (config.model.path is not None and not is_new and not own[0].startswith("LABEL_")):
        where = "in another checkpoint.dir" if saved else "with model.task"
        raise ConfigError(
            f"the data's labels are {', '.join(sorted(texts)[:12])}, and the model's {', '.join(own[:12])}",
            fix=f"write the model's labels or their numbers, or train a new head {where}",
        )
    if len(texts) == 1:
        raise LoadError(f"every record has the label {min(texts)}", fix="a head learns to tell two or more apart")
    return tuple(sorted(texts)), False


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def read_task_records(source: SourceConfig, task: Task) -> tuple[list[Record], str]:
    """Returns the records of a source, and their fingerprint. A directory of images or sound without a table has one
    below it for each label.
    """
    medium = next((column for column in task.columns if column in ("image", "audio")), None)
    path = Path(source.path or "")
    if source.path is not None and path.is_dir() and medium is not None and source.include is None:
        has_table = any(is_table(file) and file.suffix != ".json" for file in path.rglob("*"))
        found = [] if has_table else sorted(path.glob("[!.]*/[!.]*"))
        unread = [str(file) for file in found if medium == "audio" and file.suffix.lower() in _OTHER_SOUND]
        if unread:
            what = f"{counted(len(unread), 'sound file')} of {path} cannot be read: {', '.join(unread[:5])}"
            raise LoadError(what, fix="convert them to .wav with 16 bits, or move them elsewhere")
        if files := [file for file in found if file.suffix.lower() in _MEDIA]:
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
    known = (*task.columns, "text_pair", "images")
    for name in (name for source in sources for name in source.columns if name not in known):
        raise ConfigError(f"data.columns: no record of this task has {name!r}{did_you_mean(name, known)}")
    for record in records:  # rows are encoded when they are read, in the midst of the run
        for column in task.columns:
            if record.value(column) == "" and column == "response":
                raise LoadError("the response is empty", at=record.place, fix="leave the record out")
    if task.metrics == "classes":  # a label that the model does not know would end the run when its row comes
        for record in records:
            for label in _labels_of(record, task):
                tools.label(record, label)
    paddings = {"input_ids": getattr(tools.tokenizer, "pad_token_id", None) or 0}
    assert task.encode is not None, "text is kept in documents"
    return ExampleRows(records, task.encode, tools, fingerprint=repr(fingerprints), paddings=paddings)


def _load(auto_class: Any, places: Sequence[str]) -> Any:
    """Returns a processor from the first place that has one."""
    errors = []
    for place in places:
        try:
            made = auto_class.from_pretrained(place)
            if isinstance(made, transformers.PreTrainedTokenizerBase):  # AutoProcessor, where there is nothing else
                raise ValueError("there is a tokenizer only")
            return made
        except Exception as error:  # noqa: BLE001 - a damaged file raises errors of many kinds
            errors.append(error)
    raise ConfigError(
        f"{auto_class.__name__} cannot load from {' or '.join(map(repr, places))}",
        why="\n".join(map(one_line, errors)),
        fix="put the model's preprocessor_config.json there, or name another place with model.tokenizer",
    )
