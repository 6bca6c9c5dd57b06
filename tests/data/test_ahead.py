"""Batches that are fetched before their step: in order, counted when they are handed out, no error before its turn."""

from __future__ import annotations

import json
import resource
import sys
import types
import zlib
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.cli.data import open_source
from shardwise.comm.agree import run_on_local_rank_0
from shardwise.data import ahead, corpus
from shardwise.data.ahead import DeviceBatch, PackedBatches, PrefetchLoader
from shardwise.data.batch import divide_media, split_rows
from shardwise.data.config import DataConfig, patterns_of
from shardwise.data.corpus import Encoder, file_source, find_files
from shardwise.data.documents import Documents, read_documents, text_documents, write_documents
from shardwise.data.rows import StreamRows
from shardwise.errors import BatchError, ConfigError, LoadError
from shardwise.mesh import Mesh
from shardwise.ranks.spawn import spawn
from shardwise.weights.staging import atomic_file

pytestmark = pytest.mark.single


class Batches:
    """Three batches, the fourth of which cannot be read."""

    def __init__(self):
        self.num_batches_read = 0

    def __next__(self):
        if self.num_batches_read == 3:
            raise OSError("the file is gone")
        self.num_batches_read += 1
        return {"input_ids": torch.tensor([self.num_batches_read]), "name": "text"}

    def state_dict(self):
        return {"num_batches_read": self.num_batches_read}

    def load_state_dict(self, state):
        self.num_batches_read = state["num_batches_read"]


class Queue:
    """A stream or an event of a card that is not there; notes who waited."""

    def __init__(self, *args):
        self.waited = []

    def record(self, stream):
        pass

    def wait_event(self, event):
        self.waited.append(event)


@pytest.fixture
def card(monkeypatch):
    """torch pretends to have one; tensors on it stay on the host."""
    current, used = Queue(), []
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Queue)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: used.append(int(self)))
    monkeypatch.setattr(ahead, "send", lambda value, device: value + 10 if isinstance(value, torch.Tensor) else value)
    return current, used


def test_batches_come_in_order_and_are_counted_when_they_are_handed_out(card):
    current, used = card
    batches = PrefetchLoader(Batches(), torch.device("cuda", 0))
    assert next(batches)["input_ids"] == 1
    for number in (2, 3):
        batches.fetch()
        batches.fetch()
        assert batches.state_dict() == {"num_batches_read": number - 1}
        batch = next(batches)
        assert batches.state_dict() == {"num_batches_read": number}
        assert isinstance(batch, DeviceBatch) and batch["input_ids"] == number
        assert not current.waited and not used
        assert batch.take() == {"input_ids": torch.tensor([number + 10]), "name": "text"}
        assert len(current.waited) == 1 and used == [number + 10]
        current.waited.clear(), used.clear()
    batches.fetch()
    assert batches.state_dict() == {"num_batches_read": 3}
    with pytest.raises(OSError, match="gone"):
        next(batches)


def test_a_batch_on_whose_way_there_was_an_interrupt_is_read_again(card, monkeypatch):
    def interrupt(value, device):
        raise KeyboardInterrupt

    batches = PrefetchLoader(Batches(), torch.device("cuda", 0))
    with monkeypatch.context() as patched:
        patched.setattr(ahead, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batches.fetch()
    assert batches.state_dict() == {"num_batches_read": 0} and next(batches)["input_ids"] == 1


def test_on_a_cpu_nothing_is_fetched():
    batches = PrefetchLoader(Batches(), torch.device("cpu"))
    batches.fetch()
    assert batches.state_dict() == {"num_batches_read": 0}
    assert type(next(batches)) is dict


SEPARATOR = 256


def encode(texts):
    assert texts, "transformers' tokenizers fail on no texts"
    return [list(text.encode()) for text in texts]


BYTES = Encoder(encode=encode, separator=SEPARATOR, fingerprint="bytes")
PATTERNS = patterns_of(DataConfig())


def decoded(path):
    """The documents in a file, as text."""
    found, documents, start = read_documents(path, verify=True), [], 0
    for end in found.ends.tolist():
        (*tokens, separator), is_target = (part.tolist() for part in found.read(start, end - start))
        assert separator == SEPARATOR and is_target == [False] + [True] * len(tokens)
        documents.append(bytes(tokens).decode())
        start = end
    return documents


def encode_all(source, path):
    write_documents(path, text_documents(source, BYTES))
    return decoded(path)


# --- files -> tokens


def test_a_directory_is_read_in_the_order_of_its_names_and_python_counts_as_text(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, text in {
        "b.py": "x = 1\n",
        "a.txt": "äöü\r\n",
        "sub/c.md": "c",
        ".hidden/d.txt": "d",
        "e.bin": "e",
    }.items():
        (tmp_path / name).write_bytes(text.encode())
    source = file_source(find_files(tmp_path, PATTERNS))
    assert encode_all(source, tmp_path / "out") == ["äöü\r\n", "x = 1\n", "c"]


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    lines = [{"body": "one"}, {"body": "two\nlines"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    source = file_source(find_files(tmp_path / "a.jsonl", PATTERNS), text_key="body")
    assert encode_all(source, tmp_path / "out") == ["one", "two\nlines"]


def test_every_document_begins_with_the_tokens_that_a_text_begins_with(tmp_path):
    lines = [{"body": "one"}, {"body": ""}, {"body": "two"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source, start = file_source([tmp_path / "a.jsonl"], text_key="body"), ord("^")
    write_documents(tmp_path / "out", text_documents(source, replace(BYTES, start=(start,))))
    assert decoded(tmp_path / "out") == ["^one", "^two"]


@pytest.mark.parametrize("encode_chars", [1, 120])  # 1: a text, and its end in the next batch
def test_a_large_file_is_encoded_in_pieces_and_stays_one_document(tmp_path, monkeypatch, encode_chars):
    monkeypatch.setattr(corpus, "PIECE_CHARS", 50)
    monkeypatch.setattr(corpus, "ENCODE_CHARS", encode_chars)
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("end")
    source = file_source(find_files(tmp_path, PATTERNS))
    assert len(list(source.read(lambda done: None))) > 10
    done = []
    write_documents(tmp_path / "out", text_documents(source, BYTES, done.append))
    assert decoded(tmp_path / "out") == [text, "end"]
    assert done == sorted(done) and done[-1] == source.size


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.txt", b"\xff\xfe", LoadError, r"a\.txt is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{oops\n', LoadError, r"a\.jsonl:2"),
        ("a.jsonl", b'{"txt": "x"}\n', ConfigError, "did you mean 'txt'"),
        ("a.jsonl", b'["x"]\n', LoadError, "expected an object"),
        ("a.jsonl", b'{"text": 3}\n', LoadError, "holds int, not text"),
        ("a.txt", b"", LoadError, "holds no text"),
    ],
)
def test_unreadable_text_is_an_error_that_says_where_and_leaves_no_file(tmp_path, name, content, error, message):
    (tmp_path / name).write_bytes(content)
    source = file_source(find_files(tmp_path, PATTERNS))
    with pytest.raises(error, match=message):
        write_documents(tmp_path / "cache" / "out", text_documents(source, BYTES))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_path_and_a_directory_without_text_name_what_is_there(tmp_path):
    (tmp_path / "corpus").mkdir()
    with pytest.raises(LoadError, match="did you mean 'corpus'"):
        find_files(tmp_path / "corpsu", PATTERNS)
    (tmp_path / "corpus" / "a.pdf").touch()
    with pytest.raises(LoadError, match=r"\.pdf"):
        find_files(tmp_path / "corpus", PATTERNS)


def test_a_source_has_another_fingerprint_when_text_or_key_change(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    found = [file_source([file]).fingerprint, file_source([file], text_key="body").fingerprint]
    assert file_source([file]).fingerprint == found[0]
    file.write_text("another")
    found.append(file_source([file]).fingerprint)
    assert len(set(found)) == 3


def test_a_disk_that_fills_while_tokens_are_written_is_an_error_and_leaves_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("much " * 10000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, limits[1]))
    try:
        with pytest.raises(LoadError, match="cannot write the tokens to .*out") as raised:
            write_documents(tmp_path / "cache" / "out", text_documents(file_source([tmp_path / "a.txt"]), BYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(raised.value) and "data.cache_dir" in str(raised.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_file_never_appears(tmp_path):
    def write():
        with atomic_file(tmp_path / "a") as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


class Rows(list):
    """As much of a `datasets` split as we use."""

    column_names = ("text", "url")
    _fingerprint = "f"


def fake_datasets(monkeypatch, rows):
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, subset, split: rows
    module.load_from_disk = lambda name: {"train": rows}
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_datasets_split_is_read_by_its_text_column(tmp_path, monkeypatch):
    fake_datasets(monkeypatch, Rows([{"text": "one", "url": ""}, {"text": "two", "url": ""}]))
    assert encode_all(open_source(DataConfig(dataset="some/set")), tmp_path / "out") == ["one", "two"]
    with pytest.raises(ConfigError, match="did you mean 'text'"):
        encode_all(open_source(DataConfig(dataset="some/set", text_key="texts")), tmp_path / "out")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_dict.json").touch()
    assert open_source(DataConfig(dataset=str(saved))).size == 2
    with pytest.raises(LoadError, match="cannot open 'trian'"):
        open_source(DataConfig(dataset=str(saved), split="trian"))


def test_a_missing_datasets_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        open_source(DataConfig(dataset="some/set"))


# --- tokens -> batches


def stream(tokens, seq_length):
    ends = np.array([len(tokens)], dtype=np.uint64)
    return StreamRows(Documents(tokens, ends, np.ones(1, np.uint32), zlib.crc32(tokens)), seq_length=seq_length)


def batches(num_tokens=103, *, tokens=None, **options):
    settings = {"batch_size": 4, "seed": 3, **options}
    tokens = np.arange(num_tokens, dtype=np.uint32) if tokens is None else tokens
    return PackedBatches(stream(tokens, settings.pop("seq_length", 5)), **settings)


def test_a_place_in_another_text_of_as_many_tokens_is_an_error():
    state = batches().state_dict()
    batches().load_state_dict(state)
    other = np.arange(103, dtype=np.uint32)
    other[50] += 1
    with pytest.raises(ConfigError, match="checksum was"):
        batches(tokens=other).load_state_dict(state)


def take(stream, count):
    return [next(stream)["input_ids"] for _ in range(count)]


def test_a_batch_holds_whole_rows_and_labels_that_are_the_inputs():
    batch = next(batches())
    assert batch["input_ids"].shape == (4, 5) and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()
    assert all(row[0] % 5 == 0 and row.tolist() == list(range(row[0], row[0] + 5)) for row in batch["input_ids"])


def test_each_pass_reads_every_row_once_in_another_order():
    first, second = torch.cat(take(batches(), 10)).split(20)
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(0, 100, 5))
    assert first.tolist() != second.tolist()
    assert torch.cat(take(batches(seed=4), 5)).tolist() != first.tolist()


@pytest.mark.parametrize("data_size", [2, 4])
def test_ranks_share_out_the_very_batches_that_one_rank_would_read(data_size):
    ranks = [batches(data_rank=rank, data_size=data_size) for rank in range(data_size)]
    for whole in take(batches(), 12):  # more than two passes
        assert torch.equal(torch.cat([next(rank)["input_ids"] for rank in ranks]), whole)


@pytest.mark.parametrize("num_read", [0, 3, 7])
def test_a_resumed_stream_goes_on_where_it_stopped_on_any_number_of_ranks(num_read):
    stream = batches()
    take(stream, num_read)
    resumed = [batches(data_rank=rank, data_size=2) for rank in range(2)]
    for rank in resumed:
        rank.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    for whole in take(stream, 4):
        assert torch.equal(torch.cat([next(rank)["input_ids"] for rank in resumed]), whole)


def test_a_state_over_other_data_is_refused():
    with pytest.raises(ConfigError, match="seed was 4, is 3; seq_length was 6, is 5"):
        batches().load_state_dict(batches(seed=4, seq_length=6).state_dict())


def test_shares_and_rows_must_exist():
    with pytest.raises(ConfigError, match="batch of 4 rows has no share for data rank 0 of 3"):
        batches(data_size=3)
    with pytest.raises(BatchError, match="holds 4 tokens, fewer than one row of 5"):
        batches(num_tokens=4)


# --- once per machine


def work_on_ranks(path, failure):
    with Mesh.open("tp2") as mesh:

        def work():
            if failure is not None:
                raise failure
            path.write_text(path.read_text() + "x" if path.exists() else "x")

        try:
            run_on_local_rank_0(work, local_rank=mesh.rank)
        except (LoadError, KeyError) as error:
            return type(error).__name__, str(error)
        return path.read_text()


@pytest.mark.spawn
def test_one_rank_works_and_all_see_the_result(tmp_path):
    assert spawn(work_on_ranks, 2, tmp_path / "out", None) == ["x", "x"]


@pytest.mark.spawn
def test_all_ranks_hear_of_a_failure():
    outcomes = spawn(work_on_ranks, 2, None, LoadError("no such file", at="here"))
    assert outcomes == [("LoadError", "no such file\n  at:  here")] * 2
    outcomes = spawn(work_on_ranks, 2, None, KeyError("surprise"))
    assert outcomes == [("KeyError", "'surprise'")] * 2


class Model(nn.Module):
    config = SimpleNamespace(image_token_id=9)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_positions_of_three_sections_that_all_rows_share_are_not_cut(rows):
    batch = {"input_ids": torch.zeros(rows, 5, dtype=torch.long), "position_ids": torch.arange(15).view(3, 1, 5)}
    for part in split_rows(batch, rows, rows):
        assert torch.equal(part["position_ids"], batch["position_ids"])


def test_a_batch_without_images_may_hold_empty_tensors_of_them():
    batch = {
        "input_ids": torch.zeros(4, 5, dtype=torch.long),
        "pixel_values": torch.zeros(0, 7),
        "image_grid_thw": torch.zeros(0, 3, dtype=torch.long),
    }
    parts = split_rows(batch, 4, 2, divide_media(Model(), batch, 4, 2))
    assert [sorted(part) for part in parts] == [["input_ids"], ["input_ids"]]


def test_a_row_of_images_for_each_row_of_text_stays_with_it():
    """Idefics and Mllama fill rows up to the largest number of images; each image has a placeholder."""
    batch = {"input_ids": torch.zeros(4, 5, dtype=torch.long), "pixel_values": torch.arange(12).view(4, 3)}
    for row, count in enumerate((1, 1, 3, 3)):
        batch["input_ids"][row, :count] = Model.config.image_token_id
    parts = split_rows(batch, 4, 2, divide_media(Model(), batch, 4, 2))
    assert torch.equal(parts[0]["pixel_values"], batch["pixel_values"][:2])
    assert torch.equal(parts[1]["pixel_values"], batch["pixel_values"][2:])
