"""The task of a run: its model class, its labels, and what turns records into examples."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from shardwise.cli.data import read_records
from shardwise.data.config import SourceConfig, WeightedSource, sources_of
from shardwise.data.documents import Record
from shardwise.data.tasks import TASKS, ExampleRows, Task, Tools
from shardwise.errors import ConfigError, LoadError, UnsupportedError, one_line
from shardwise.parallel.build import model_class_of, read_config
from shardwise.train.run_config import TrainConfig

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


def class_of(config: TrainConfig) -> Any:
    """Returns the `auto_class` argument of `load`. With a task, or `model.allow_missing`, a new head may be trained on
    the checkpoint's body; otherwise the checkpoint names the class.
    """
    if config.model.task is None and not config.model.allow_missing:
        return None
    return getattr(transformers, TASKS[config.model.task or "causal-lm"].auto_class)


def class_to_probe(config: TrainConfig) -> Any:
    """Returns the auto class of the run's task."""
    return getattr(transformers, TASKS[find_task(config)].auto_class)


def load_options(config: TrainConfig, model_config: Any) -> dict[str, Any]:
    """Returns the options of `load` for a new head: what is outside of the body may be missing or of other shapes."""
    if config.model.task is None or config.model.path is None:
        return {}
    chosen = class_of(config)._model_mapping.get(type(model_config), None)
    if chosen is None:
        return {}
    import torch

    with torch.device("meta"):
        model = chosen(model_config)
    body = f"{chosen.base_model_prefix}."
    new = [name for name, _ in model.named_parameters() if not name.startswith(body) or ".pooler." in name]
    return {"allow_missing": new, "ignore_mismatched_sizes": True}


def open_tools(config: TrainConfig, model_config: Any, tokenizer: Any) -> tuple[Tools, Any]:
    """Returns what turns the run's records into examples, and the model's config with the labels of the data."""
    name = find_task(config)
    task = TASKS[name]
    place = str(config.model.tokenizer or config.model.path)
    source = config.data.path or ""
    tools = Tools(
        tokenizer=tokenizer,
        images=_load(transformers.AutoImageProcessor, place) if "images" in task.needs else None,
        audio=_load(transformers.AutoFeatureExtractor, place) if "audio" in task.needs else None,
        processor=_load(transformers.AutoProcessor, place) if "processor" in task.needs else None,
        columns=config.data.columns,
        seq_length=config.data.seq_length,
        directory=Path(source) if Path(source).is_dir() else Path(source).parent,
    )
    if task.metrics != "classes":
        return tools, model_config
    labels = _find_labels(config, task, tools, model_config)
    if labels != tuple((model_config.id2label or {}).values()):
        _set_labels(model_config, labels)
    return replace(tools, labels=labels), model_config


def _set_labels(model_config: Any, labels: Sequence[str]) -> None:
    model_config.id2label = dict(enumerate(labels)) if labels else {0: "LABEL_0"}
    model_config.label2id = {label: number for number, label in model_config.id2label.items()}
    if not labels:
        model_config.problem_type = "regression"


def _find_labels(config: TrainConfig, task: Task, tools: Tools, model_config: Any) -> tuple[str, ...]:
    """Returns the names of the classes by index: the model's own where it has those of the data, else the data's.

    Floating-point numbers are no classes.
    """
    column, found = task.columns[-1], set()
    for source in sources_of(config.data):
        for record in read_task_records(source, task)[0]:
            value = tools.value(record, column)
            found.update(value if isinstance(value, list) else [value])
    if any(isinstance(value, float) for value in found) and column == "label":
        return ()
    own = tuple(str(name) for _, name in sorted((model_config.id2label or {}).items()))
    numbers = {int(value) for value in found if str(value).isdecimal()}
    if len(numbers) == len(found):
        return own if numbers and max(numbers) < len(own) else tuple(f"LABEL_{n}" for n in range(max(numbers) + 1))
    if {str(value) for value in found} <= set(own):
        return own
    if len(found) > _MOST_LABELS:
        raise LoadError(f"the data has {len(found):,} labels", why="a class has one", fix="name the label's column")
    return tuple(sorted(map(str, found)))


def read_task_records(source: SourceConfig, task: Task) -> tuple[Sequence[Record], str]:
    """Returns the records of a source, and their fingerprint. A directory of images or sound has one below it for each
    label.
    """
    path = Path(source.path) if source.path is not None else None
    medium = next((column for column in task.columns if column in ("image", "audio")), None)
    if path is not None and path.is_dir() and medium is not None and source.include is None:
        files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in _MEDIA)
        if files:
            records = [
                Record(str(file), {medium: str(file.resolve()), task.columns[-1]: file.parent.name}) for file in files
            ]
            return records, repr([(str(file), file.stat().st_mtime_ns) for file in files])
    return read_records(source)


def example_rows(sources: Sequence[SourceConfig], task: Task, tools: Tools) -> ExampleRows:
    """Returns the rows of sources; those with weight 2 are there twice. Communicates nothing."""
    records: list[Record] = []
    fingerprints = []
    for source in sources:
        own, fingerprint = read_task_records(source, task)
        weight = source.weight if isinstance(source, WeightedSource) else 1.0
        records += [own[number % len(own)] for number in range(round(weight * len(own)))]
        fingerprints.append((fingerprint, weight))
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
