"""The task of a run: its model class, its labels, and what turns records into examples."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from shardwise.cli.data import read_records
from shardwise.data.config import SourceConfig, WeightedSource, sources_of
from shardwise.data.corpus import digest
from shardwise.data.documents import Record
from shardwise.data.tables import is_table
from shardwise.data.tasks import TASKS, ExampleRows, Task, Tools, column_of, find_label
from shardwise.errors import ConfigError, LoadError, UnsupportedError, counted, one_line
from shardwise.parallel.build import model_class_of, read_config
from shardwise.train.run_config import ModelConfig, TrainConfig

_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".wav")
_MOST_LABELS = 1000


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
        auto_class = getattr(transformers, task.auto_class)
        if chosen is auto_class or auto_class._model_mapping.get(type(model_config), None) is chosen:
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
    return None if chosen is None else getattr(transformers, TASKS[chosen].auto_class)


_ADAPTED = {
    "causal-lm": "CAUSAL_LM",
    "image-text-to-text": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}


def adapter_options(config: TrainConfig) -> dict[str, Any]:
    """Returns PEFT's `task_type` of the run's task; where it has none, the head as modules that are trained whole."""
    name = find_task(config)
    if name in _ADAPTED:
        return {"task_type": _ADAPTED[name]}
    model_config = read_config(config.model.path or config.model.config or {}, {})[0]
    model = _meta_model(getattr(transformers, TASKS[name].auto_class), model_config)
    tied = {key.partition(".")[0] for key in getattr(model, "all_tied_weights_keys", None) or ()}
    heads = [child for child, _ in model.named_children() if child not in (model.base_model_prefix, *tied)]
    return {"modules_to_save": heads or None}


def _meta_model(auto_class: Any, model_config: Any) -> Any:
    with torch.device("meta"):
        return auto_class._model_mapping[type(model_config)](copy.deepcopy(model_config))


def class_to_probe(config: TrainConfig) -> Any:
    """Returns the auto class of the run's task."""
    return getattr(transformers, TASKS[find_task(config)].auto_class)


def load_options(config: TrainConfig, model_config: Any) -> dict[str, Any]:
    """Returns the options of `load` for a new head: what is outside of the body may be missing or of other shapes."""
    if config.model.task is None or config.model.path is None:
        return {}
    if type(model_config) not in class_of(config)._model_mapping:
        return {}
    model = _meta_model(class_of(config), model_config)
    body = f"{model.base_model_prefix}."
    new = [name for name, _ in model.named_parameters() if not name.startswith(body) or ".pooler." in name]
    return {"allow_missing": new, "ignore_mismatched_sizes": True}


def open_tools(config: TrainConfig, model_config: Any, tokenizer: Any) -> tuple[Tools, Any]:
    """Returns what turns the run's records into examples, and the model's config with the labels of the data."""
    name = find_task(config)
    task = TASKS[name]
    place = str(config.model.tokenizer or config.model.path)
    tools = Tools(
        tokenizer=tokenizer,
        images=_load(transformers.AutoImageProcessor, place) if "images" in task.needs else None,
        audio=_load(transformers.AutoFeatureExtractor, place) if "audio" in task.needs else None,
        processor=_load(transformers.AutoProcessor, place) if "processor" in task.needs else None,
        seq_length=config.data.seq_length,
        start_token=getattr(model_config, "decoder_start_token_id", None) if "audio" in task.needs else None,
    )
    if tools.processor is not None and config.data.chat_template is not None:
        tools.processor.chat_template = tokenizer.chat_template
    if task.metrics != "classes":
        return tools, model_config
    labels = _find_labels(config, task, model_config)
    size = max(1, len(labels))
    if config.model.path is not None and config.model.task is None and model_config.num_labels != size:
        raise ConfigError(
            f"the data has {counted(size, 'label')}, and the model's head {model_config.num_labels}",
            why=f"the labels are {', '.join(labels[:12]) or 'numbers'}",
            fix=f"set model.task: {name} to train a new head",
        )
    _set_labels(model_config, labels)
    return replace(tools, labels=labels), model_config


def _set_labels(model_config: Any, labels: Sequence[str]) -> None:
    model_config.id2label = dict(enumerate(labels)) if labels else {0: "LABEL_0"}
    model_config.label2id = {label: number for number, label in model_config.id2label.items()}
    model_config.problem_type = "single_label_classification" if labels else "regression"


def _find_labels(config: TrainConfig, task: Task, model_config: Any) -> tuple[str, ...]:
    """Returns the names of the classes by index: the model's own where it has those of the data, else the data's.

    Numbers that are not all whole are no classes, and those for a head of one number.
    """
    column, found = task.columns[-1], set()
    for source in sources_of(config.data):
        for record in read_task_records(source, task)[0]:
            value = column_of(record, column)
            if value == "":
                raise LoadError("the label is empty", at=record.place, fix="leave the record out")
            found.update(value if isinstance(value, list) else [value])
    texts = {str(value) for value in found}
    own = tuple(str(name) for _, name in sorted((model_config.id2label or {}).items()))
    if all(_is_number(text) for text in texts):
        is_whole = all(text.isdecimal() for text in texts)
        if column == "label" and (not is_whole or (config.model.task is None and len(own) == 1)):
            return ()
        if not is_whole:
            raise LoadError(f"labels such as {min(texts)} are no classes", fix="number classes from 0, or name them")
        most = max(map(int, texts))
        return own if most < len(own) else tuple(f"LABEL_{number}" for number in range(most + 1))
    if all(find_label(own, text) is not None for text in texts):
        return own
    if len(texts) > _MOST_LABELS:
        raise LoadError(f"the data has {len(texts):,} labels", why="a class has one", fix="name the label's column")
    return tuple(sorted(texts))


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
        has_table = any(is_table(file) for file in path.rglob("*"))
        files = [] if has_table else sorted(file for file in path.glob("*/*") if file.suffix.lower() in _MEDIA)
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
        records += [own[order[number % len(own)]] for number in range(round(weight * len(own)))]
        fingerprints.append((fingerprint, weight))
    if task.metrics == "classes":  # a label that the model does not know would end the run when its row comes
        for record in records:
            value = column_of(record, task.columns[-1])
            for label in value if isinstance(value, list) else [value]:
                tools.label(record, label)
    padding = getattr(tools.tokenizer, "pad_token_id", None)
    paddings = {"input_ids": 0 if padding is None else padding}
    assert task.encode is not None, "text is kept in documents"
    return ExampleRows(records, task.encode, tools, fingerprint=repr(fingerprints), paddings=paddings)


def _load(auto_class: Any, place: str) -> Any:
    try:
        return auto_class.from_pretrained(place)
    except Exception as error:  # a damaged file raises errors of many kinds
        raise ConfigError(
            f"{auto_class.__name__} cannot load from {place!r}",
            why=one_line(error),
            fix="put the model's preprocessor_config.json there, or name another place with model.tokenizer",
        ) from error
