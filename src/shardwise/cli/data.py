"""The tokenizer and the rows of a run: tokenized once per machine, cached, and opened by every rank."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from rich.console import Console
from rich.progress import Progress

from shardwise.cli.config_file import Problems
from shardwise.cli.launch import local_rank
from shardwise.comm.agree import run_on_local_rank_0
from shardwise.data.config import (
    RECORD_PATTERNS,
    DataConfig,
    Problem,
    SourceConfig,
    columns_of,
    held_out,
    patterns_of,
    rows_of,
    sources_of,
)
from shardwise.data.corpus import (
    DataSource,
    Encoder,
    Record,
    dataset_records,
    dataset_source,
    digest,
    file_records,
    file_source,
    find_files,
)
from shardwise.data.documents import (
    Document,
    Documents,
    documents_path,
    read_documents,
    text_documents,
    write_documents,
)
from shardwise.data.examples import build_example_encoder, encode_examples, encode_texts, start_tokens
from shardwise.data.rows import DocumentMasking, DocumentRows, MaskedRows, MixedRows, Rows, StreamRows
from shardwise.data.tables import import_package
from shardwise.errors import ConfigError, LoadError, as_error, counted, did_you_mean
from shardwise.train.run_config import TrainConfig
from shardwise.weights.locate import locate_source

logger = logging.getLogger("shardwise.train")

_CHECKED_RECORDS = 100


def prepare_rows(
    config: TrainConfig,
    data: DataConfig,
    tokenizer: Any,
    console: Console,
    *,
    apart: DocumentMasking,
    dtype: torch.dtype,
    masks: bool,
) -> Callable[[], Rows]:
    """Tokenizes `data` on one rank of each machine, unless a cache exists; returns a function that opens the rows.

    Args:
        apart: how documents of packed or padded rows are separated.
        masks: whether tokens are masked and learned, for a masked language model.

    Communicates: like `run_on_local_rank_0`.
    """
    directory = Path(config.data.cache_dir or Path(config.log.dir) / "tokens")
    paths: list[Path] = []

    def tokenize() -> None:
        paths.extend(_tokenize(source, tokenizer, directory, console) for source in sources_of(data))

    def cut(documents: Documents) -> Rows:
        if rows_of(data) == "stream":
            return StreamRows(documents, seq_length=data.seq_length)
        padding = build_encoder(tokenizer).separator if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        options: dict[str, Any] = {"seq_length": data.seq_length, "too_long": data.too_long, "dtype": dtype}
        return DocumentRows(documents, apart=apart, padding=padding, **options)

    def read() -> Rows:
        # The other ranks open the source afterwards: by then a data set of the hub has been downloaded once.
        found = paths or [
            documents_path(directory, _open_documents(source, tokenizer).fingerprint) for source in sources_of(data)
        ]
        parts = [cut(read_documents(path)) for path in found]
        rows: Rows = MixedRows(parts, [source.weight for source in data.sources]) if data.sources else parts[0]
        if masks:
            kept, mask = tokenizer.all_special_ids, tokenizer.mask_token_id
            return MaskedRows(rows, mask=mask, num_tokens=len(tokenizer), kept=kept, seed=config.seed)
        return rows

    run_on_local_rank_0(tokenize, local_rank=local_rank())
    return read


def _tokenize(source: SourceConfig, tokenizer: Any, directory: Path, console: Console) -> Path:
    """Writes the documents of a source, unless a sound file of them exists; returns its path."""
    documents, files = _open_documents(source, tokenizer), _files_of(source, patterns_of(source))
    path = documents_path(directory, documents.fingerprint)
    try:
        if path.exists():
            read_documents(path, verify=True)
            return path
    except LoadError as error:
        logger.warning("%s (%s); it is written again", error.summary, error.why)
    if not console.is_terminal:
        console.print("tokenizing ...")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"tokenizing {source.path or source.dataset}", total=documents.size or None)
        num_targets = write_documents(path, documents.read(lambda done: bar.update(task, completed=done)))
    written = read_documents(path)
    parts = f"{len(written.ends):,} documents, {len(written.tokens):,} tokens, {num_targets:,} of them learned"
    name = f"{source.path}, {counted(len(files), 'file')}" if files else source.dataset
    console.print(f"tokens  {name}: {parts}")
    return path


def check_records(config: TrainConfig, tokenizer: Any) -> list[Problem]:
    """Returns the problems of the first records, and of the keys and the template with which they are read."""
    problems = Problems()
    sources = [("data", config.data)]
    if config.evaluation.path is not None:
        sources.append(("evaluation", held_out(config.data, config.evaluation)))
    for key, source in [(key, source) for key, data in sources for source in sources_of(data)]:
        if source.format != "text" and source.path is not None:  # a dataset might have to be downloaded
            with problems.of(f"{key}.path"):
                documents = _open_documents(source, tokenizer, limit=_CHECKED_RECORDS)
                if not list(documents.read(lambda done: None)):
                    raise LoadError("the data holds no records", at=key, why="every file is empty")
    return problems


def _open_documents(source: SourceConfig, tokenizer: Any, *, limit: int | None = None) -> DataSource[Document]:
    """Returns the documents of a source; with `limit` only of the first records."""
    encoder, files = build_encoder(tokenizer), _files_of(source, patterns_of(source))
    if source.format == "text":
        text = open_source(source, files)
        return DataSource(
            fingerprint=digest(text.fingerprint, encoder.fingerprint, encoder.start, encoder.separator),
            size=text.size,
            read=lambda on_progress: text_documents(text, encoder, on_progress),
        )
    examples = build_example_encoder(tokenizer, kind=source.format, as_chat=source.as_chat, learn=source.learn)
    records = open_records(source, files)
    return DataSource(
        fingerprint=digest(records.fingerprint, examples.fingerprint, encoder.fingerprint),
        size=records.size,
        read=lambda on_progress: encode_examples(itertools.islice(records.read(on_progress), limit), examples),
    )


def _files_of(source: SourceConfig, patterns: Sequence[str]) -> tuple[Path, ...]:
    return () if source.path is None else find_files(Path(source.path), patterns)


def open_source(source: SourceConfig, files: Sequence[Path] = ()) -> DataSource[str | None]:
    """Returns the texts of `files`, or of the data set that `source` names."""
    key = columns_of(source)["text"]
    return file_source(files, text_key=key) if files else dataset_source(text_key=key, **_open_dataset(source))


def open_records(source: SourceConfig, files: Sequence[Path] = ()) -> DataSource[Record]:
    """Returns the records of `files`, or of the data set that `source` names."""
    opened = file_records(files) if files else dataset_records(**_open_dataset(source))
    columns = columns_of(source)

    def read(on_progress: Callable[[int], None]) -> Iterator[Record]:
        return (replace(each, columns=columns) for each in opened.read(on_progress))

    return replace(opened, fingerprint=digest(opened.fingerprint, columns), read=read)


def read_records(source: SourceConfig) -> tuple[list[Record], str]:
    """Returns all records of a source, in memory, and a fingerprint that changes with what they hold."""
    files = _files_of(source, source.include or RECORD_PATTERNS)
    if not files:
        opened = open_records(source)
        return list(opened.read(lambda done: None)), opened.fingerprint
    records = [
        replace(each, directory=file.parent)
        for file in files
        for each in open_records(source, [file]).read(lambda done: None)
    ]
    return records, digest(columns_of(source), [digest(sorted(each.values.items())) for each in records])


def _import_datasets(config: SourceConfig) -> Any:
    return import_package("datasets", repr(config.dataset), fix="pip install datasets, or give files with data.path")


def find_dataset(config: SourceConfig) -> None:
    """Raises `LoadError` if the data set cannot be had. Downloads at most what describes it."""
    datasets = _import_datasets(config)
    if Path(str(config.dataset)).is_dir():
        return
    fix = "check its name and subset, and that the hub is reached"
    with as_error(LoadError, f"the data set {config.dataset!r} cannot be had", fix=fix), _tried_once(datasets, config):
        datasets.load_dataset_builder(config.dataset, config.subset)


@contextmanager
def _tried_once(datasets: Any, config: SourceConfig) -> Iterator[None]:
    """Context manager: where the hub is not reached, stored data sets alone are looked for, without five retries."""
    before = datasets.config.HF_HUB_OFFLINE
    try:
        HfApi().dataset_info(str(config.dataset), timeout=10)
    except Exception as error:  # noqa: BLE001 - of the HTTP library, which differs
        if isinstance(error, ConnectionError) or type(error).__name__ in ("ConnectError", "ConnectTimeout"):
            datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _open_dataset(config: SourceConfig) -> dict[str, Any]:
    """Returns the rows of a split, their number (0: unknown), and a text that changes with them."""
    datasets = _import_datasets(config)
    name, most = str(config.dataset), config.max_records
    what = f"datasets cannot open {config.split!r} of {name!r}"
    with as_error(LoadError, what, KeyError, OSError, ValueError, at="data.dataset"):
        if any((Path(name) / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(name)
            rows = rows[config.split] if isinstance(rows, dict) else rows
        else:
            streams = {"streaming": True} if config.streamed else {}
            rows = datasets.load_dataset(name, config.subset, split=config.split, **streams)
    if config.streamed:
        about = [name, config.subset, config.split, most, str(getattr(rows, "info", ""))]
        return {"rows": rows if most is None else rows.take(most), "size": most or 0, "fingerprint": digest(about)}
    size = len(rows) if most is None else min(most, len(rows))
    fingerprint = str(rows._fingerprint) if most is None else f"{rows._fingerprint} {size}"
    return {"rows": rows if most is None else rows.select(range(size)), "size": size, "fingerprint": fingerprint}


def load_tokenizer(config: TrainConfig) -> Any:
    """Returns the run's tokenizer. Raises `LoadError` if transformers cannot load it."""
    tokenizer = read_tokenizer(str(config.model.tokenizer or config.model.path), option="model.tokenizer")
    if (chosen := config.data.chat_template) is not None:
        tokenizer.chat_template = read_template(tokenizer, chosen)
    return tokenizer


def read_template(tokenizer: Any, chosen: str) -> str:
    """Returns the chat template in the file `chosen`, or the tokenizer's of that name; else raises `ConfigError`."""
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if chosen in named:
        return str(named[chosen])
    try:
        return Path(chosen).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template is {chosen}, which is no file{did_you_mean(chosen, named)}",
            why=f"the tokenizer has {', '.join(named)}" if named else "the tokenizer has no named templates",
            fix="name a file with a Jinja template",
        ) from error


def read_tokenizer(place: str, *, option: str) -> Any:
    """Returns the tokenizer of the directory or hub id in `option`. Raises `LoadError` if it cannot be loaded."""
    locate_source(place)
    fix = f"set {option} to a directory or hub id with tokenizer files"
    with as_error(LoadError, f"cannot load a tokenizer from {place!r}", fix=fix):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        if len(tokenizer.get_vocab().keys() - special) < 2:  # transformers invents one where there are no files
            raise ValueError("there are no tokenizer files, so its vocabulary has special tokens only")
        return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Returns a digest of a tokenizer's vocabulary and rules."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return digest(f"{type(tokenizer).__name__} {rules}")


def build_encoder(tokenizer: Any) -> Encoder:
    """Returns the `Encoder` of `tokenizer`. Raises `ConfigError` if the tokenizer has no end token."""
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token",
            why="it separates the documents that share a row",
            fix='set one and save it: tokenizer.eos_token = "</s>"; tokenizer.save_pretrained(...)',
        )

    fingerprint, start = tokenizer_digest(tokenizer), tuple(start_tokens(tokenizer))
    return Encoder(encode=partial(encode_texts, tokenizer), separator=int(end), fingerprint=fingerprint, start=start)
