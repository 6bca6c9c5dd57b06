"""Rows of tokens: a stream that is cut, or separate documents, padded or packed.

# [Note: packed rows]
Several documents share a row and must not attend to each other. Positions restart at 0 in each document, from which
transformers' models make the mask (`masking_utils.find_packed_sequence_indices`, without attention mask and cache).
Models that also need a mask get one of four dims. The rest of a row is padding, one more document without targets. The
first token of a document is no target, because the token before it belongs to another document. `probe/label_use.py`
tests whether a model keeps documents apart.
"""

import bisect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.data.batch import IGNORED
from shardwise.data.documents import Documents
from shardwise.errors import BatchError, ConfigError

DocumentMasking = Literal["padded", "padded without mask", "positions", "mask"]
"""What keeps documents apart: a row each (with a mask of the padding, where the model takes one), or in packed rows
positions that restart, alone or with a mask of four dims."""

_WIDTH_STEP = 64  # padded rows are rounded up: few widths, little compiled


class Rows:
    """Rows of a data set, by number.

    Attributes:
        checksum: of what the rows are made of.
        kind: text that must be equal, besides the tokens, when a run is resumed.
    """

    num_rows: int
    num_tokens: int
    seq_length: int
    checksum: int
    kind = ""

    def width(self, batch: Sequence[int]) -> int:
        """Returns the number of tokens in a row of a global batch."""
        return self.seq_length

    def read(self, rows: Sequence[int], *, width: int, turn: int = 0) -> dict[str, Tensor]:
        """Returns rows of batch number `turn` as the model's inputs and labels; of text int64 [len(rows), width]."""
        raise NotImplementedError

    def identity(self) -> dict[str, int]:
        """Returns numbers that tell these rows from others."""
        counts = {"num_rows": self.num_rows} if self.kind else {}
        return {"num_tokens": self.num_tokens, "seq_length": self.seq_length, "checksum": self.checksum, **counts}

    def describe(self) -> dict[str, Any]:
        """Returns as JSON what must be the same when a run goes on."""
        return {"tokens": f"{self.checksum:08x}", **({"rows": self.kind} if self.kind else {})}

    def notes(self) -> str:
        """Says how many documents were cut or dropped."""
        return ""


class StreamRows(Rows):
    """Concatenated documents cut into rows of `seq_length`, without the last tokens. Every token is a target."""

    def __init__(self, documents: Documents, *, seq_length: int) -> None:
        self.documents, self.seq_length, self.num_tokens = documents, seq_length, len(documents.tokens)
        self.checksum = documents.checksum
        self.num_rows = self.num_tokens // seq_length
        if self.num_rows == 0:
            raise BatchError(
                f"the data holds {self.num_tokens:,} tokens, fewer than one row of {seq_length:,}",
                fix="use more text or a smaller data.seq_length",
            )

    def read(self, rows: Sequence[int], *, width: int, turn: int = 0) -> dict[str, Tensor]:
        """Returns `input_ids` and `labels`, which are equal: transformers' causal models shift labels."""
        read = [self.documents.read(row * self.seq_length, self.seq_length)[0] for row in rows]
        input_ids = torch.from_numpy(np.stack(read))
        return {"input_ids": input_ids, "labels": input_ids.clone()}


class DocumentRows(Rows):
    """Rows of documents that do not attend to each other; see [Note: packed rows].

    Args:
        seq_length: maximum number of tokens in a row.
        too_long: handling of longer documents: "truncate" cuts their end off, "drop" removes them. A document without
            targets left is removed.
        dtype: dtype of a four-dimensional mask: the model's dtype of computation.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        seq_length: int,
        too_long: Literal["truncate", "drop"] = "truncate",
        apart: DocumentMasking = "padded",
        padding: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.documents, self.seq_length, self.apart = documents, seq_length, apart
        self.checksum, self._padding, self._dtype = documents.checksum, padding, dtype
        self.kind = "padded" if apart.startswith("padded") else "packed"
        ends = documents.ends.astype(np.int64)
        lengths = np.diff(ends, prepend=0)
        starts = np.subtract(ends, lengths, out=ends)
        is_long = lengths > seq_length
        kept = (documents.first_targets < seq_length) & (~is_long if too_long == "drop" else True)
        self.num_truncated, self.num_dropped = int((is_long & kept).sum()), int((~kept).sum())
        if not kept.any():
            raise BatchError(
                f"none of {len(lengths):,} documents is left",
                why=f"all have more than {seq_length:,} tokens and are dropped, or their first target comes later",
                fix="use a larger data.seq_length, or shorter prompts",
            )
        self._starts, self._lengths = starts[kept], np.minimum(lengths[kept], seq_length).astype(np.int32)
        del ends, lengths, starts, is_long, kept  # packing takes as much again
        self.num_tokens = int(self._lengths.sum(dtype=np.int64))
        self._packed = pack_documents(self._lengths, seq_length) if apart in ("positions", "mask") else None
        self.num_rows = len(self._lengths) if self._packed is None else self._packed.num_rows

    def width(self, batch: Sequence[int]) -> int:
        """Returns the number of tokens in a row of this batch: of padded rows as many as its longest needs."""
        if self._packed is not None:
            return self.seq_length
        longest = int(self._lengths[list(batch)].max())
        return min(self.seq_length, -(-longest // _WIDTH_STEP) * _WIDTH_STEP)

    def read(self, rows: Sequence[int], *, width: int, turn: int = 0) -> dict[str, Tensor]:
        """Returns `input_ids`, `labels` (-100 if not learned), and the inputs that keep documents apart.

        These are an `attention_mask` of padding, or `position_ids` and, if the model needs it, an additive
        `attention_mask` [len(rows), 1, width, width].
        """
        input_ids = np.full((len(rows), width), self._padding, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
        lengths = []
        for place, row in enumerate(rows):
            at, numbers = 0, [row] if self._packed is None else self._packed.in_row(row)
            for number in numbers:
                tokens, is_target = self.documents.read(int(self._starts[number]), int(self._lengths[number]))
                input_ids[place, at : at + len(tokens)] = tokens
                labels[place, at : at + len(tokens)] = np.where(is_target, tokens, IGNORED)
                at += len(tokens)
            lengths.append([int(self._lengths[number]) for number in numbers])
        found = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        return found | segment_inputs(lengths, width, apart=self.apart, dtype=self._dtype)

    def notes(self) -> str:
        """Says how many documents were cut or dropped."""
        found = {"truncated": self.num_truncated, "dropped": self.num_dropped}
        return ", ".join(f"{number:,} {what}" for what, number in found.items() if number)


class MixedRows(Rows):
    """Rows of several sources.

    A source with weight 2 has each of its rows twice; one with weight 0.5 has half of them, drawn once for all.
    """

    kind = "mixed"

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float]) -> None:
        self.parts, self.weights = parts, weights
        self.num_tokens, self.seq_length = sum(part.num_tokens for part in parts), parts[0].seq_length
        numbers = [max(1, round(part.num_rows * weight)) for part, weight in zip(parts, weights, strict=True)]
        self._ends = np.cumsum(numbers).tolist()
        self.num_rows = self._ends[-1]
        self.checksum = zlib.crc32(repr([part.identity() for part in parts]).encode())
        self._orders = [np.random.default_rng(0).permutation(part.num_rows).astype(np.int32) for part in parts]

    def _place(self, row: int) -> tuple[int, int]:
        """Returns the part of a row, and its number there."""
        part = bisect.bisect_right(self._ends, row)
        first = self._ends[part - 1] if part else 0
        return part, int(self._orders[part][(row - first) % self.parts[part].num_rows])

    def width(self, batch: Sequence[int]) -> int:
        """Returns the number of tokens in a row of this batch."""
        places = [self._place(row) for row in batch]
        return max(self.parts[part].width([row]) for part, row in places)

    def read(self, rows: Sequence[int], *, width: int, turn: int = 0) -> dict[str, Tensor]:
        """Returns the rows like the parts do."""
        places = [self._place(row) for row in rows]
        read = [self.parts[part].read([row], width=width, turn=turn) for part, row in places]
        return {name: torch.cat([each[name] for each in read]) for name in read[0]}

    def describe(self) -> dict[str, Any]:
        """Returns what the parts describe, and their weights."""
        return {"sources": [part.describe() for part in self.parts], "weights": list(self.weights)}

    def notes(self) -> str:
        """Says how many documents were cut or dropped."""
        return ", ".join(filter(None, (part.notes() for part in self.parts)))


class MaskedRows(Rows):
    """Rows of text of which some tokens are masked, and learned (arXiv 1810.04805, section 3.1).

    Of the chosen tokens 80 % are replaced by the mask, 10 % by random tokens, and 10 % stay. The choice depends on the
    seed, the row and the number of the batch.

    Args:
        kept: ids that are never chosen: the special tokens.
    """

    SHARE = 0.15

    def __init__(self, rows: Rows, *, mask: int | None, num_tokens: int, kept: Sequence[int], seed: int) -> None:
        if mask is None:
            raise ConfigError("the tokenizer has no mask token", why="masked language models learn what it stands for")
        self.rows, self.num_rows, self.checksum, self.kind = rows, rows.num_rows, rows.checksum, rows.kind
        self.num_tokens, self.seq_length = rows.num_tokens, rows.seq_length
        self._mask, self._num_ids, self._kept, self._seed = mask, num_tokens, list(kept), seed

    def width(self, batch: Sequence[int]) -> int:
        """Returns the number of tokens in a row of this batch."""
        return self.rows.width(batch)

    def read(self, rows: Sequence[int], *, width: int, turn: int = 0) -> dict[str, Tensor]:
        """Returns the rows with masks; `labels` are -100 at tokens that were not chosen."""
        found = self.rows.read(rows, width=width)
        ids = found["input_ids"].numpy()
        may_be_chosen = (found["labels"].numpy() != IGNORED) & ~np.isin(ids, self._kept)
        labels = np.full_like(ids, IGNORED)
        for place, row in enumerate(rows):
            random = np.random.default_rng([self._seed, turn, row])
            draws = np.where(may_be_chosen[place], random.random(len(ids[place])), 2.0)
            is_chosen = may_be_chosen[place] & (draws < max(self.SHARE, draws.min() + 1e-12))  # at least one
            labels[place, is_chosen] = ids[place, is_chosen]
            kinds, others = random.random(len(draws)), random.integers(self._num_ids, size=len(draws))
            ids[place] = np.where(is_chosen & (kinds < 0.8), self._mask, ids[place])
            ids[place] = np.where(is_chosen & (kinds >= 0.9), others, ids[place])
        return {**found, "labels": torch.from_numpy(labels)}

    def describe(self) -> dict[str, Any]:
        """Returns what the rows describe, and that they are masked."""
        return {**self.rows.describe(), "masked": self.SHARE}

    def notes(self) -> str:
        """Says how many documents were cut or dropped."""
        return self.rows.notes()


@dataclass(frozen=True)
class PackedRows:
    """Assignment of documents to rows.

    Attributes:
        documents: [num_documents] int32 indices of documents, row by row.
        starts: [num_rows + 1] int64: start of each row in `documents`, and the end of the last.
    """

    documents: NDArray[np.int32]
    starts: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    def in_row(self, row: int) -> NDArray[np.int32]:
        """Returns the indices of the documents in a row, in order."""
        return self.documents[self.starts[row] : self.starts[row + 1]]


def pack_documents(lengths: NDArray[np.integer[Any]], seq_length: int) -> PackedRows:
    """Packs documents into rows of at most `seq_length` tokens by best-fit decreasing.

    Takes the longest document first and puts it into the fullest row with enough room. Documents of equal length are
    placed together. The result depends only on the lengths.

    Args:
        lengths: [num_documents], each from 1 to `seq_length`.
    """
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    row_of = np.empty(len(order), dtype=np.int32)  # in that order
    with_room: dict[int, list[NDArray[np.int32]]] = {}  # room -> rows that have it, those filled last at the end
    rooms: list[int] = []  # those, sorted
    num_rows = at = 0
    numbers = np.bincount(lengths, minlength=seq_length + 1).tolist()  # of documents by length
    for length in range(seq_length, 0, -1):
        end = at + numbers[length]
        while at < end:
            place = bisect.bisect_left(rooms, length)
            room = rooms[place] if place < len(rooms) else seq_length
            fitting = room // length
            needed = -(-(end - at) // fitting)
            if place < len(rooms):
                last = with_room[room].pop()
                rows = last[-needed:][::-1]
                if needed < len(last):
                    with_room[room].append(last[:-needed])
                elif not with_room[room]:
                    del with_room[room], rooms[place]
            else:
                rows = np.arange(num_rows, num_rows + needed, dtype=np.int32)
                num_rows += needed
            taken = min(end - at, fitting * len(rows))
            row_of[at : at + taken] = np.repeat(rows, fitting)[:taken]
            at += taken
            num_full, rest = divmod(taken, fitting)
            for filled, left in ((rows[:num_full], room - fitting * length), (rows[num_full:], room - rest * length)):
                if left > 0 and len(filled):
                    if left not in with_room:
                        bisect.insort(rooms, left)
                    with_room.setdefault(left, []).append(filled)
    by_row = np.argsort(row_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])
    return PackedRows(order[by_row], starts)


def segment_inputs(
    lengths: Sequence[Sequence[int]], width: int, *, apart: DocumentMasking, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Returns the inputs that keep documents apart. `lengths`: the documents' lengths in each row."""
    if apart == "padded without mask":
        return {}
    filled = [[*row, *([width - sum(row)] if sum(row) < width else [])] for row in lengths]
    if apart == "padded":
        return {"attention_mask": torch.stack([(torch.arange(width) < sum(row)).long() for row in lengths])}
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in filled])
    if apart == "positions":
        return {"position_ids": positions}
    segments = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in filled])
    is_seen = (segments[:, :, None] == segments[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
    least = torch.finfo(dtype).min
    mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill(~is_seen, least)[:, None]
    return {"position_ids": positions, "attention_mask": mask}
