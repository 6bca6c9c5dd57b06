"""Documents that keep to themselves: the file of them, the rows they make, and what a model is given with these."""

from __future__ import annotations

import itertools
import json
import tracemalloc

import numpy as np
import pytest
import torch

from shardwise.data.ahead import PackedBatches
from shardwise.data.documents import Document, documents_path, read_documents, write_documents
from shardwise.data.rows import DocumentRows, MixedRows, pack_documents, segment_inputs
from shardwise.errors import BatchError, ConfigError, LoadError
from shardwise.train.loop import evaluation_batches

pytestmark = pytest.mark.single

LENGTHS = (7, 3, 12, 5, 9, 3, 2)


def document(number, length, num_prompt=1):
    tokens = np.arange(length, dtype=np.uint32) + 100 * (number + 1)
    return Document(tokens, np.arange(length) >= num_prompt)


@pytest.fixture
def path(tmp_path):
    path = documents_path(tmp_path, "some", "source")
    write_documents(path, (document(number, length) for number, length in enumerate(LENGTHS)))
    return path


# --- the file


def test_documents_are_read_as_they_were_written(path):
    found = read_documents(path, verify=True)
    starts = [0, *found.ends[:-1].tolist()]
    for number, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        tokens, is_target = found.read(start, length)
        expected = document(number, length)
        assert tokens.tolist() == expected.tokens.tolist() and is_target.tolist() == expected.is_target.tolist()
    assert found.first_targets.tolist() == [1] * len(LENGTHS)


def test_a_first_token_is_no_target_and_a_document_without_one_is_an_error(tmp_path):
    path = tmp_path / "out"
    write_documents(path, [document(0, 4, num_prompt=0)])
    assert read_documents(path).read(0, 4)[1].tolist() == [False, True, True, True]
    with pytest.raises(LoadError, match="nothing to learn"):
        write_documents(path, [document(0, 4), document(1, 1, num_prompt=0)])
    with pytest.raises(LoadError, match="holds no text"):
        write_documents(path, [])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda file: file[:-1], "its end is missing"),
        (lambda file: file[4:], "bytes of"),
        (lambda file: b"", "its end is missing"),
        (lambda file: file.replace(b"SHDOCUME\x01", b"SHDOCUME\x07"), "it has version 7"),
        (lambda file: bytes([file[0] ^ 1]) + file[1:], "its checksum is another"),
        (lambda file: file[:170] + bytes([file[170] ^ 1]) + file[171:], "its checksum is another"),
    ],
)
def test_a_file_that_was_cut_or_changed_is_told(path, damage, why):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LoadError) as raised:
        read_documents(path, verify=True)
    assert why in raised.value.why and "made again" in raised.value.fix


# --- rows


def best_fit(lengths, seq_length):
    """One document at a time, the longest first, into the fullest row that has room; the last filled of several."""
    rows, left, filled = [], [], []
    for number in np.argsort(-lengths, kind="stable").tolist():
        fitting = [row for row in range(len(rows)) if left[row] >= lengths[number]]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            left.append(seq_length)
            filled.append(0)
        row = min(fitting, key=lambda each: (left[each], -filled[each]))
        rows[row].append(number)
        left[row] -= int(lengths[number])
        filled[row] = max(filled) + 1
    return rows


@pytest.mark.parametrize(("longest", "seq_length"), [(64, 64), (9, 64), (3, 5), (1, 4)])
def test_rows_are_packed_tightly_as_one_document_after_the_other_would_be(longest, seq_length):
    lengths = np.random.default_rng(0).integers(1, longest + 1, size=2000)
    packed = pack_documents(lengths, seq_length)
    rows = [packed.in_row(row).tolist() for row in range(packed.num_rows)]
    assert rows == best_fit(lengths, seq_length)
    assert len(rows) <= 1.02 * lengths.sum() / seq_length + 1


@pytest.mark.parametrize("apart", ["positions", "padded"])
def test_a_document_takes_few_bytes(tmp_path, apart):
    path, number = tmp_path / "out", 20_000
    one = document(0, 5)
    tracemalloc.start()
    write_documents(path, itertools.repeat(one, number))
    rows = rows_of(path, apart=apart)
    order = PackedBatches(rows, batch_size=4)
    next(order)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * number, peak


def rows_of(path, **options):
    return DocumentRows(read_documents(path), **{"seq_length": 12, "apart": "positions", "padding": 9, **options})


def test_a_packed_row_holds_documents_whose_positions_begin_again(path):
    rows = rows_of(path)
    batch = rows.read(range(rows.num_rows), width=rows.width(range(rows.num_rows)))
    found = []
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(ids)]
        for start, end in itertools.pairwise(starts):
            assert positions[start:end].tolist() == list(range(end - start)) and labels[start] == -100
            if ids[start] != 9:
                found.append(ids[start:end].tolist())
                assert labels[start + 1 : end].tolist() == found[-1][1:]
            else:
                assert (labels[start:end] == -100).all() and (ids[start:end] == 9).all()
    assert sorted(found) == [document(number, length).tokens.tolist() for number, length in enumerate(LENGTHS)]
    assert "attention_mask" not in batch and rows.notes() == ""


def test_a_padded_row_holds_one_document_and_is_as_wide_as_the_widest_of_its_batch(tmp_path):
    path = tmp_path / "out"
    write_documents(path, [document(0, 5), document(1, 70), document(2, 100), document(3, 6)])
    rows = rows_of(path, apart="padded", seq_length=80)
    assert (rows.num_truncated, rows.num_dropped, rows.notes()) == (1, 0, "1 truncated")
    batch = rows.read([0], width=rows.width([0, 3]))
    assert batch["input_ids"].shape == (1, 64) and batch["attention_mask"].tolist() == [[1] * 5 + [0] * 59]
    assert (
        rows.read([0], width=rows.width([0, 1]))["labels"].shape
        == rows.read([2], width=rows.width([2]))["labels"].shape
        == (1, 80)
    )
    assert rows.read([0], width=rows.width([0]))["labels"][0, :6].tolist() == [-100, 101, 102, 103, 104, -100]


def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path):
    path = tmp_path / "out"
    write_documents(path, [document(0, 5, 2), document(1, 9, 3), document(2, 9, 7), document(3, 6, 2)])
    cut, left = rows_of(path, seq_length=6), rows_of(path, seq_length=6, too_long="drop")
    assert cut.notes() == "1 truncated, 1 dropped" and cut.num_tokens == 5 + 6 + 6
    assert left.notes() == "2 dropped" and left.num_tokens == 5 + 6
    with pytest.raises(BatchError, match="none of 4 documents is left"):
        rows_of(path, seq_length=2)


def test_a_mask_of_four_dims_shows_a_document_its_own_past(path):
    (mask,) = segment_inputs([(2, 3)], 6, apart="mask", dtype=torch.bfloat16)["attention_mask"]
    assert mask.dtype == torch.bfloat16 and (mask == 0).int().tolist() == [
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 0],
            [0, 0, 0, 0, 0, 1],
        ]
    ]


@pytest.mark.parametrize("apart", ["positions", "padded"])
def test_ranks_share_batches_and_a_resumed_stream_goes_on(path, apart):
    def batches(**options):
        return PackedBatches(rows_of(path, apart=apart), **{"batch_size": 4, "seed": 3, **options})

    whole = batches()
    for _ in range(3):
        next(whole)
    ranks = [batches(data_rank=rank, data_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(3):
        expected, parts = next(whole), [next(rank) for rank in ranks]
        assert all(torch.equal(torch.cat([part[name] for part in parts]), expected[name]) for name in expected)
    other = PackedBatches(rows_of(path, apart=apart, seq_length=11), batch_size=4, seed=3)
    with pytest.raises(ConfigError, match="seq_length was 12, is 11"):
        other.load_state_dict(whole.state_dict())


def test_evaluation_reads_every_row_once_and_fills_up_with_rows_that_count_nothing(path):
    rows = rows_of(path, apart="padded")
    for data_size in (1, 2):
        read = [
            list(evaluation_batches(rows, batch_size=4, max_batches=9, data_rank=rank, data_size=data_size))
            for rank in range(data_size)
        ]
        assert {len(batches) for batches in read} == {2}
        counted = sum(int((batch["labels"] != -100).sum()) for batches in read for _, batch in batches)
        assert counted == sum(LENGTHS) - len(LENGTHS)


def test_rows_of_several_sources_are_mixed_by_weight(tmp_path):
    parts = []
    for name, lengths in {"few": (5, 6), "many": (9, 70, 8, 7)}.items():
        write_documents(tmp_path / name, [document(number, length) for number, length in enumerate(lengths)])
        parts.append(rows_of(tmp_path / name, apart="padded", seq_length=80))
    rows = MixedRows(parts, [2.0, 0.5])
    assert rows.num_rows == 2 * 2 + 2 and rows.num_tokens == sum(part.num_tokens for part in parts)
    assert rows.width([0, 1, 2, 3]) == 64 and rows.width(range(6)) in (64, 80)
    read = rows.read(range(6), width=80)
    few, many = ([part.read([row], width=80)["input_ids"] for row in range(part.num_rows)] for part in parts)
    for number, expected in enumerate([few, few, few, few, many, many]):
        own = read["input_ids"][number : number + 1]
        assert any(torch.equal(own, each) for each in expected), number
    assert torch.equal(read["input_ids"][:2], read["input_ids"][2:4]) and len(read["labels"].unique(dim=0)) == 4
    orders = {tuple(MixedRows(parts, [1.0, 1.0])._place(row)[1] for row in range(2, 6)) for _ in range(2)}
    assert len(orders) == 1, "drawn once for all"
    assert rows.identity() != MixedRows(parts, [1.0, 0.5]).identity()
