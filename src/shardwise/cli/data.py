"""The tokenizer and the rows of a run: tokenized once per machine, cached, and opened by every rank."""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

from shardwise.cli.config_file import Problems
from shardwise.cli.launch import local_rank
from shardwise.comm.agree import agree_on, run_on_local_rank_0
from shardwise.comm.collectives import Group
from shardwise.data.config import DataConfig, held_out, patterns_of, rows_of
from shardwise.data.corpus import DataSource, Encoder, dataset_source, digest, file_source, find_files
from shardwise.data.documents import (
    Document,
    Record,
    dataset_records,
    documents_path,
    file_records,
    read_documents,
    text_documents,
    write_documents,
)
from shardwise.data.examples import build_example_encoder, encode_examples
from shardwise.data.rows import DocumentMasking, DocumentRows, Rows, StreamRows
from shardwise.errors import ConfigError, LoadError, one_line
from shardwise.train.run_config import Problem, TrainConfig
from shardwise.weights.locate import locate_source

logger = logging.getLogger("shardwise.train")

_CHECKED_RECORDS = 100


def prepare_rows(
    config: TrainConfig,
    data: DataConfig,
    tokenizer: Any,
    console: Console,
    *,
    group: Group | None,
    apart: DocumentMasking,
    dtype: torch.dtype,
) -> Rows:
    """Returns the rows of `data`, tokenized by one rank of each machine unless a cache exists.

    Args:
        apart: how documents of packed or padded rows are separated.

    Communicates: like `run_on_local_rank_0` and `agree_on`.
    """
    directory = Path(config.data.cache_dir or Path(config.log.dir) / "tokens")
    paths: list[Path] = []

    def tokenize() -> None:
        documents = _open_documents(data, tokenizer)
        paths.append(path := documents_path(directory, *documents.fingerprints))
        try:
            if path.exists():
                read_documents(path, verify=True)
                return
        except LoadError as error:
            logger.warning("%s (%s); it is written again", error.summary, error.why)
        if not console.is_terminal:
            console.print("tokenizing ...")
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("tokenizing", total=documents.size)
            write_documents(path, documents.read(lambda done: bar.update(task, completed=done)))

    def read() -> tuple[Rows, dict[str, str]]:
        # The other ranks open the source afterwards: by then a data set of the hub has been downloaded once.
        path = paths[0] if paths else documents_path(directory, *_open_documents(data, tokenizer).fingerprints)
        documents = read_documents(path)
        rows: Rows
        if rows_of(data) == "stream":
            rows = StreamRows(documents, seq_length=data.seq_length)
        else:
            rows = DocumentRows(
                documents,
                seq_length=data.seq_length,
                too_long=data.too_long,
                apart=apart,
                padding=int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id),
                dtype=dtype,
            )
        return rows, {f"the {key} of the rows": str(value) for key, value in rows.identity().items()}

    run_on_local_rank_0(tokenize, local_rank=local_rank())
    return agree_on(
        group,
        read,
        doing="reading the data",
        what="the ranks read different data",
        fix="give every machine the same files, tokenizer and versions, or a directory that all of them share",
    )


def check_records(config: TrainConfig, tokenizer: Any) -> list[Problem]:
    """Returns the problems of the first records, and of the keys and the template with which they are read."""
    problems = Problems()
    sources = [("data", config.data)]
    if config.evaluation.path is not None:
        sources.append(("evaluation", held_out(config.data, config.evaluation)))
    for key, data in sources:
        if data.format != "text" and data.path is not None:  # a dataset might have to be downloaded
            with problems.of(f"{key}.path"):
                documents = _open_documents(data, tokenizer, limit=_CHECKED_RECORDS)
                if not list(documents.read(lambda done: None)):
                    raise LoadError("the data holds no records", at=key, why="every file is empty")
    return problems


@dataclass(frozen=True)
class _Documents:
    """Tokenized documents of a source.

    Attributes:
        fingerprints: digests of the source, and of everything else that determines the tokens.
        size: size of the source, in its own unit.
        read: yields the documents, and calls its argument with the amount read so far.
    """

    fingerprints: tuple[str, str]
    size: int
    read: Callable[[Callable[[int], None]], Iterator[Document]]


def _open_documents(data: DataConfig, tokenizer: Any, *, limit: int | None = None) -> _Documents:
    """Returns the documents of `data`; with `limit` only of the first records."""
    encoder = build_encoder(tokenizer)
    if data.format == "text":
        text = open_source(data)
        fingerprints = text.fingerprint, f"text {encoder.fingerprint} {encoder.separator}"
        return _Documents(fingerprints, text.size, lambda on_progress: text_documents(text, encoder, on_progress))
    names = ("prompt", "response") if data.format == "prompt" else ("messages", "tools")
    keys = {name: str(getattr(data, f"{name}_key")) for name in names}
    examples = build_example_encoder(tokenizer, kind=data.format, keys=keys, as_chat=data.as_chat)
    records = open_records(data)

    def read(on_progress: Callable[[int], None]) -> Iterator[Document]:
        return encode_examples(itertools.islice(records.read(on_progress), limit), examples)

    fingerprints = records.fingerprint, f"{examples.fingerprint} {encoder.fingerprint}"
    return _Documents(fingerprints, records.size, read)


def open_source(config: DataConfig) -> DataSource[str | None]:
    """Returns the documents that `config` names."""
    if config.path is not None:
        return file_source(find_files(Path(config.path), patterns_of(config)), text_key=config.text_key)
    return dataset_source(_open_dataset(config), text_key=config.text_key)


def open_records(config: DataConfig) -> DataSource[Record]:
    """Returns the records that `config` names: prompts with responses, or lists of messages."""
    if config.path is not None:
        return file_records(find_files(Path(config.path), patterns_of(config)))
    return dataset_records(_open_dataset(config))


def import_datasets(config: DataConfig) -> Any:
    """Returns the library that opens `config.dataset`. Raises `ConfigError` if it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{config.dataset!r} needs the package datasets, which is not installed",
            fix="pip install datasets, or give files with data.path",
        ) from error
    return datasets


def _open_dataset(config: DataConfig) -> Any:
    datasets = import_datasets(config)
    name = str(config.dataset)
    try:
        if any((Path(name) / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            return saved[config.split] if isinstance(saved, dict) else saved
        return datasets.load_dataset(name, config.subset, split=config.split)
    except (KeyError, OSError, ValueError) as error:
        raise LoadError(
            f"datasets cannot open {config.split!r} of {name!r}", at="data.dataset", why=str(error)
        ) from error


def load_tokenizer(config: TrainConfig) -> Any:
    """Returns the run's tokenizer. Raises `LoadError` if transformers cannot load it."""
    return read_tokenizer(str(config.model.tokenizer or config.model.path), option="model.tokenizer")


def read_tokenizer(place: str, *, option: str) -> Any:
    """Returns the tokenizer of the directory or hub id in `option`. Raises `LoadError` if it cannot be loaded."""
    locate_source(place)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        if len(tokenizer.get_vocab().keys() - special) < 2:  # transformers invents one where there are no files
            raise ValueError("there are no tokenizer files, so its vocabulary has special tokens only")
        return tokenizer
    except Exception as error:  # a damaged file raises errors of many kinds
        raise LoadError(
            f"cannot load a tokenizer from {place!r}",
            why=one_line(error),
            fix=f"set {option} to a directory or hub id with tokenizer files",
        ) from error


def build_encoder(tokenizer: Any) -> Encoder:
    """Returns the `Encoder` of `tokenizer`. Raises `ConfigError` if the tokenizer has no end token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token",
            why="it separates the documents that share a row",
            fix='set one and save it: tokenizer.eos_token = "</s>"; tokenizer.save_pretrained(...)',
        )

    def encode(texts: list[str]) -> list[list[int]]:
        # verbose: it would warn of texts longer than the model's context, which are cut into rows later.
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    fingerprint = digest(f"{type(tokenizer).__name__} {rules}")
    return Encoder(encode=encode, separator=int(tokenizer.eos_token_id), fingerprint=fingerprint)
