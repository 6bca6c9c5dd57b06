"""The rows that a run reads: made once on each machine, kept, and opened by every rank."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from shardwise.cli.config_file import Problems
from shardwise.cli.launch import local_rank
from shardwise.cli.sources import open_records, open_source
from shardwise.cli.tokenizer import build_encoder
from shardwise.comm.agree import agree_on, once_per_machine
from shardwise.comm.operations import Group
from shardwise.data.config import DataConfig, held_out, rows_of
from shardwise.data.corpus import DataSource
from shardwise.data.documents import Document, documents_path, read_documents, text_documents, write_documents
from shardwise.data.examples import ExampleEncoder, build_example_encoder, encode_examples
from shardwise.data.records import Record
from shardwise.data.rows import Apart, DocumentRows, Rows, StreamRows
from shardwise.errors import LoadError
from shardwise.train.run_config import Problem, TrainConfig

__all__ = ["check_records", "prepare_rows"]

logger = logging.getLogger("shardwise.train")

_FEW_RECORDS = 100
"""How many records are read to find what is wrong with all of them."""


def prepare_rows(
    config: TrainConfig,
    data: DataConfig,
    tokenizer: Any,
    console: Console,
    *,
    group: Group | None,
    apart: Apart,
    dtype: torch.dtype,
) -> Rows:
    """The rows of `data`, encoded by one rank of each machine unless an earlier run has done so.

    Args:
        group: of all ranks.
        apart: what keeps documents of packed or padded rows apart.
        dtype: what the model computes in.

    Raises:
        LoadError: a file, a line or a record is not what it should be; the same on every rank.
        BatchError: there is not one row.
        RankError: machines see different text.

    Communicates: as `once_per_machine` and `agree_on`.
    """
    directory = Path(config.data.cache_dir or Path(config.log.dir) / "tokens")
    maker = _maker_of(data, tokenizer)

    def find() -> tuple[Path, DataSource[Any]]:
        source = maker.open()
        return documents_path(directory, source.fingerprint, maker.fingerprint), source

    path = _prepare(find, maker, console)

    def read() -> tuple[Rows, dict[str, str]]:
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

    return agree_on(
        group,
        read,
        doing="reading the data",
        what="the ranks read different data",
        fix="give every machine the same files, tokenizer and versions, or a directory that all of them share",
    )


def check_records(config: TrainConfig, tokenizer: Any) -> list[Problem]:
    """What is wrong with the first records, or with how they are to be read."""
    problems = Problems()
    sources = [("data", config.data)]
    if config.evaluation.path is not None:
        sources.append(("evaluation", held_out(config.data, config.evaluation)))
    for key, data in sources:
        if data.format != "text" and data.dataset is None:  # which might be downloaded
            with problems.of(f"{key}.path"):
                maker = _maker_of(data, tokenizer)
                if not list(maker.make(maker.open(), lambda done: None, limit=_FEW_RECORDS)):
                    raise LoadError("the data holds no records", at=key, why="every file is empty")
    return problems


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """What makes documents of a source.

    Attributes:
        open: finds the source.
        make: its documents, given it and what is told of progress; of records at most as many as a third argument says.
        fingerprint: digest of what decides them besides the source.
    """

    open: Callable[[], DataSource[Any]]
    make: Callable[..., Iterator[Document]]
    fingerprint: str


def _maker_of(data: DataConfig, tokenizer: Any) -> _Maker:
    encoder = build_encoder(tokenizer)
    if data.format == "text":

        def of_text(source: DataSource[str | None], on_progress: Callable[[int], None]) -> Iterator[Document]:
            return text_documents(source, encoder, on_progress)

        fingerprint = f"text {encoder.fingerprint} {encoder.separator}"
        return _Maker(open=lambda: open_source(data), make=of_text, fingerprint=fingerprint)
    names = ("prompt", "response") if data.format == "prompt" else ("messages", "tools")
    keys = {name: str(getattr(data, f"{name}_key")) for name in names}
    examples: ExampleEncoder = build_example_encoder(tokenizer, kind=data.format, keys=keys, as_chat=data.as_chat)

    def of_records(
        source: DataSource[Record], on_progress: Callable[[int], None], limit: int | None = None
    ) -> Iterator[Document]:
        return encode_examples(itertools.islice(source.read(on_progress), limit), examples)

    fingerprint = f"{examples.fingerprint} {encoder.fingerprint}"
    return _Maker(open=lambda: open_records(data), make=of_records, fingerprint=fingerprint)


def _prepare(find: Callable[[], tuple[Path, DataSource[Any]]], maker: _Maker, console: Console) -> Path:
    """The file that `find` names, written by one rank of each machine unless it is there and complete."""

    def work() -> None:
        path, source = find()
        try:
            if path.exists():
                read_documents(path, verify=True)
                return
        except LoadError as error:
            logger.warning("%s (%s); it is made again", error.summary, error.why)
        if not console.is_terminal:
            console.print("tokenizing ...")
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("tokenizing", total=source.size)
            write_documents(path, maker.make(source, lambda done: bar.update(task, completed=done)))

    # The others look for the source afterwards: by then a data set of the hub has been downloaded once.
    once_per_machine(work, local_rank=local_rank())
    return find()[0]
