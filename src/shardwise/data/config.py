"""Configuration of a run's data: the keys `data` and `evaluation` of its file."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from shardwise.data.tables import TABLES

TEXT_PATTERNS = ("**/*.txt", "**/*.md", "**/*.rst", "**/*.py", "**/*.jsonl", "**/*.parquet")
RECORD_PATTERNS = tuple(f"**/*{suffix}" for suffix in TABLES if suffix != ".json")  # which are mostly settings
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""Where files are; no shell has read a `~` in it."""
Format = Literal["text", "prompt", "chat"]
TaskName = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "image-classification",
    "audio-classification",
    "speech-seq2seq",
    "ctc",
    "image-text-to-text",
]


@dataclass(frozen=True)
class Problem:
    """One error in a configuration.

    Attributes:
        key: dotted key, such as `optimizer.lr`.
        fix: what to write instead; empty if `what` already says it.
    """

    key: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" + (f"; {self.fix}" if self.fix else "")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of data."""

    path: Place | None = None
    """A text file, a table (.jsonl, .json, .csv, .tsv, .parquet), or a directory of them."""
    dataset: str | None = None
    """Instead of `path`: a `datasets` hub id, or a directory that `datasets` can open."""
    subset: str | None = None
    """Configuration name of a `dataset` that has several."""
    split: str = "train"
    """Split of a `dataset`."""
    streamed: bool = False
    """Read a `dataset` from the hub as it is tokenized, without a copy on disk."""
    max_records: PositiveInt | None = None
    """Read the first N records of a `dataset` only."""
    format: Format = "text"
    """What a record holds: `text`, all of which is trained on; `prompt`, with a response; or `chat`, a list of messages
    for the tokenizer's chat template. Of the last two, only responses are trained on. Records of Alpaca (`instruction`,
    `input`, `output`) are prompts, and those of ShareGPT (`conversations`) chats."""
    text_key: str = "text"
    """Column or key that holds the text, in a `dataset` or a table."""
    prompt_key: str = "prompt"
    """Column or key that holds the prompt."""
    response_key: str = "response"
    """Column or key that holds the response; trained on, with the end token."""
    messages_key: str = "messages"
    """Column or key that holds the messages: `[{"role": "user", "content": "..."}, {"role": "assistant", ...}]`. A
    message with `weight: 0` or `train: false` is not trained on."""
    tools_key: str = "tools"
    """Column or key that holds tools for the chat template; a record need not have it."""
    as_chat: bool = False
    """Write a prompt and its response as messages of user and assistant, with the chat template."""
    learn: Literal["all", "last"] = "all"
    """Whether all messages of the assistant are trained on, or the last one of a conversation."""
    columns: dict[str, str] = field(default_factory=dict)
    """Where a record holds what, such as `{text: sentence, label: stars}`; `text_key` and the other keys say the same.
    The names are text (and text_pair) and label; tokens and tags; question, context and answers; image or audio and
    label; audio and text; messages and images, or tools; prompt and response."""
    include: tuple[str, ...] | None = None
    """Which files of a directory are read, as glob patterns below it; by default tables but .json; of `text`
    .txt, .md, .rst, .py, .jsonl and .parquet."""


@dataclass(frozen=True, kw_only=True)
class WeightedSource(SourceConfig):
    """One of several sources."""

    weight: Annotated[PositiveFloat, Field(allow_inf_nan=False)] = 1.0
    """How often it is read in a pass over the data; 0.5 reads half of it."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """Source of the text, and how it is cut into rows."""

    sources: tuple[WeightedSource, ...] = ()
    """Instead of `path` or `dataset`: several sources, each with these keys and a weight:
    `[{path: code/, weight: 2}, {path: chats.jsonl, format: chat}]`."""
    chat_template: Place | None = None
    """A template in place of the tokenizer's own: a file, or the name of one that the tokenizer has."""
    seq_length: Annotated[int, Field(ge=2)] = 512
    """Tokens in a row, at least 2: each token predicts the next."""
    rows: Literal["auto", "stream", "packed", "padded"] = "auto"
    """How documents become rows: `stream`, one after the other and cut anywhere; `packed`, several to a row, none of
    which sees another; or `padded`, one to a row. `auto` is stream for text, else packed."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to documents of packed and padded rows that are longer than `seq_length`; they are counted."""
    cache_dir: Place | None = None
    """Where tokens are kept; by default `tokens` in the log directory. Share it between runs to tokenize once."""
    state: Place | None = None
    """A data_state.json from the log directory of an earlier run: reading continues where that run stopped."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out text, and how often the loss on it is reported."""

    path: Place | None = None
    """Like `data.path`, with the same keys (of several sources those of the first); null evaluates nothing."""
    format: Format | None = None
    """What its records hold, under the keys that `data` names; null is `data.format`."""
    every: PositiveInt = 100
    """Steps between evaluations; the last step is always followed by one."""
    max_batches: PositiveInt = 50
    """Most batches of one evaluation, of `batch_size` rows each."""
    max_new_tokens: PositiveInt = 64
    """Tokens that are generated for each row where texts are compared (ROUGE, word error rate)."""
    metric: str = "loss"
    """What tells which step is the best: loss, perplexity, accuracy, f1, exact_match, rougeL, ..., wer or mse."""
    patience: PositiveInt | None = None
    """Ends the run after N evaluations that were no better than the best before them."""


def rows_of(data: DataConfig) -> Literal["stream", "packed", "padded"]:
    """Returns how documents become rows."""
    if data.rows == "auto":
        return "stream" if all(source.format == "text" for source in sources_of(data)) else "packed"
    return data.rows


def sources_of(data: DataConfig) -> tuple[SourceConfig, ...]:
    """Returns the sources of the data."""
    return data.sources or (data,)


def columns_of(source: SourceConfig) -> dict[str, str]:
    """Returns the names of a record's fields by the names that we give them."""
    names = ("text", "prompt", "response", "messages", "tools")
    return {name: getattr(source, f"{name}_key") for name in names} | source.columns


def patterns_of(data: SourceConfig) -> tuple[str, ...]:
    """Returns the file patterns that select the files of a directory."""
    if data.include is not None:
        return data.include
    return TEXT_PATTERNS if data.format == "text" else RECORD_PATTERNS


_OF_DATASETS = ("subset", "split", "streamed", "max_records")
"""The keys that say something of a `dataset`."""


def held_out(data: DataConfig, evaluation: EvaluationConfig) -> DataConfig:
    """Returns the `DataConfig` for evaluation: `data`, or its first source, with the evaluation's path and format."""
    first = sources_of(data)[0]
    data = replace(data, sources=(), **{each.name: getattr(first, each.name) for each in fields(SourceConfig)})
    chosen = evaluation.format or data.format
    rows = "auto" if data.rows == "stream" and chosen != "text" else data.rows
    as_chat = data.as_chat and chosen == "prompt"
    unset = {name: getattr(DataConfig, name) for name in ("dataset", "state", *_OF_DATASETS)}
    return replace(data, path=evaluation.path, format=chosen, rows=rows, as_chat=as_chat, **unset)


_MEANT_FOR = {
    "text": ("text_key",),
    "prompt": ("prompt_key", "response_key", "as_chat"),
    "chat": ("learn", "messages_key", "tools_key"),
}
"""The keys that say something of one format only."""
OF_TEXT = (*(key for keys in _MEANT_FOR.values() for key in keys), "rows", "too_long")
"""Keys of `data` for tasks that read text, prompts or chats."""


def check_data(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[Problem]:
    """Yields every error that the values show."""
    if data.sources:
        for each in fields(SourceConfig):
            if getattr(data, each.name) != (each.default if each.name != "columns" else {}):
                yield Problem(f"data.{each.name}", "is a key of each source where there are data.sources")
    for number, source in enumerate(sources_of(data)):
        key = f"data.sources[{number}]" if data.sources else "data"
        if (source.path is None) == (source.dataset is None):
            given = "neither is given" if source.path is None else "both are given"
            yield Problem(key, f"takes either path (files) or dataset (the datasets library); {given}")
        for name in _OF_DATASETS if source.dataset is None else ():
            if getattr(source, name) != getattr(SourceConfig, name):
                yield Problem(f"{key}.{name}", f"has an effect only with {key}.dataset")
    for each in fields(EvaluationConfig):
        if evaluation.path is None and (value := getattr(evaluation, each.name)) != each.default:
            yield Problem(f"evaluation.{each.name}", f"is {value}, and nothing is held out", "name evaluation.path")
    yield from _check_rows(data, evaluation)


def _check_rows(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[Problem]:
    defaults = {each.name: each.default for each in fields(DataConfig)}
    own = {source.format for source in sources_of(data)}
    formats = {*own, *({evaluation.format} if evaluation.format and evaluation.path else ())}
    for meant_for, keys in _MEANT_FOR.items():
        for key in keys if not data.sources and meant_for not in formats else ():
            if getattr(data, key) != defaults[key]:
                what = f"says something of data.format: {meant_for}; the format is {data.format}"
                yield Problem(f"data.{key}", what)
    if data.rows == "stream" and own != {"text"}:
        what = f"is stream with data.format: {max(own - {'text'})}, whose documents keep to themselves"
        yield Problem("data.rows", what, "use packed or padded")
    kinds = {rows_of(data), *({rows_of(held_out(data, evaluation))} if evaluation.path else ())}
    if data.too_long != defaults["too_long"] and kinds == {"stream"}:
        yield Problem("data.too_long", "applies to data.rows: packed or padded; a stream is cut anywhere")
