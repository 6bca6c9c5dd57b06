"""Configuration of a run's data: the keys `data` and `evaluation` of its file."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

TEXT_PATTERNS = ("**/*.txt", "**/*.md", "**/*.rst", "**/*.py", "**/*.jsonl")
RECORD_PATTERNS = ("**/*.jsonl",)
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""Where files are; no shell has read a `~` in it."""
Format = Literal["text", "prompt", "chat"]


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
class DataConfig:
    """Source of the text, and how it is cut into rows."""

    path: Place | None = None
    """A text or .jsonl file, or a directory of them."""
    dataset: str | None = None
    """Instead of `path`: a `datasets` hub id, or a directory that `datasets` can open."""
    subset: str | None = None
    """Configuration name of a `dataset` that has several."""
    split: str = "train"
    """Split of a `dataset`."""
    format: Format = "text"
    """What a record holds: `text`, all of which is trained on; `prompt`, with a response; or `chat`, a list of messages
    for the tokenizer's chat template. Of the last two, only responses are trained on."""
    text_key: str = "text"
    """Column of a `dataset`, or key of a .jsonl line, that holds the text."""
    prompt_key: str = "prompt"
    """Column or key that holds the prompt."""
    response_key: str = "response"
    """Column or key that holds the response; trained on, with the end token."""
    messages_key: str = "messages"
    """Column or key that holds the messages: `[{"role": "user", "content": "..."}, {"role": "assistant", ...}]`."""
    tools_key: str = "tools"
    """Column or key that holds tools for the chat template; a record need not have it."""
    as_chat: bool = False
    """Write a prompt and its response as messages of user and assistant, with the chat template."""
    include: tuple[str, ...] | None = None
    """Which files of a directory are read, as glob patterns below it; by default `**/*.jsonl`, and of `text` also
    .txt, .md, .rst and .py."""
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
    """A text or .jsonl file, or a directory of them; null evaluates nothing."""
    format: Format | None = None
    """What its records hold, under the keys that `data` names; null is `data.format`."""
    every: PositiveInt = 100
    """Steps between evaluations; the last step is always followed by one."""
    max_batches: PositiveInt = 50
    """Most batches of one evaluation, of `batch_size` rows each."""


def rows_of(data: DataConfig) -> Literal["stream", "packed", "padded"]:
    """Returns how documents become rows."""
    if data.rows == "auto":
        return "stream" if data.format == "text" else "packed"
    return data.rows


def patterns_of(data: DataConfig) -> tuple[str, ...]:
    """Returns the file patterns that select the files of a directory."""
    if data.include is not None:
        return data.include
    return TEXT_PATTERNS if data.format == "text" else RECORD_PATTERNS


def held_out(data: DataConfig, evaluation: EvaluationConfig) -> DataConfig:
    """Returns the `DataConfig` for evaluation: `data` with the evaluation's path and format."""
    chosen = evaluation.format or data.format
    rows = "auto" if data.rows == "stream" and chosen != "text" else data.rows
    as_chat = data.as_chat and chosen == "prompt"
    return replace(
        data, path=evaluation.path, dataset=None, subset=None, format=chosen, rows=rows, as_chat=as_chat, state=None
    )


_MEANT_FOR = {
    "text_key": ("text",),
    "prompt_key": ("prompt",),
    "response_key": ("prompt",),
    "as_chat": ("prompt",),
    "messages_key": ("chat",),
    "tools_key": ("chat",),
}
"""The formats in which a key says something."""


def check_data(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[Problem]:
    """Yields every error that the values show."""
    if (data.path is None) == (data.dataset is None):
        given = "neither is given" if data.path is None else "both are given"
        yield Problem("data", f"takes either path (files) or dataset (the datasets library); {given}")
    for key in ("subset", "split") if data.dataset is None else ():
        if getattr(data, key) != getattr(DataConfig, key):
            yield Problem(f"data.{key}", "has an effect only with data.dataset")
    for each in fields(EvaluationConfig):
        if evaluation.path is None and (value := getattr(evaluation, each.name)) != each.default:
            yield Problem(f"evaluation.{each.name}", f"is {value}, and nothing is held out", "name evaluation.path")
    yield from _check_rows(data, evaluation)


def _check_rows(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[Problem]:
    defaults = {each.name: each.default for each in fields(DataConfig)}
    formats = {data.format, *({evaluation.format} if evaluation.format and evaluation.path else ())}
    for key, meant_for in _MEANT_FOR.items():
        if getattr(data, key) != defaults[key] and not formats & {*meant_for}:
            what = f"says something of data.format: {meant_for[0]}; the format is {data.format}"
            yield Problem(f"data.{key}", what)
    if data.rows == "stream" and data.format != "text":
        what = f"is stream with data.format: {data.format}, whose documents keep to themselves"
        yield Problem("data.rows", what, "use packed or padded")
    kinds = {rows_of(data), *({rows_of(held_out(data, evaluation))} if evaluation.path else ())}
    if data.too_long != defaults["too_long"] and kinds == {"stream"}:
        yield Problem("data.too_long", "applies to data.rows: packed or padded; a stream is cut anywhere")
