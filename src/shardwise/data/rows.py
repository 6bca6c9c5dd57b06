"""Rows of tokens: a stream that is cut, or documents that keep to themselves, padded or packed.

# [Note: packed rows]
Several documents share a row, one after the other, and none may see another. Positions restart at 0 in each, from
which transformers' models make the mask (`masking_utils.find_packed_sequence_indices`: where no attention mask is given
and no cache is kept); models that need a mask besides are given one of four dims. What is left of a row is filled with
padding, which is one more document without targets. The first token of a document is no target: what stands before it
is another's. Whether a model keeps documents apart is tried (`probe/documents.py`), not known by its name.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.data.batch import IGNORED
from shardwise.data.documents import Documents
from shardwise.errors import BatchError

__all__ = ["DocumentMasking", "DocumentRows", "PackedRows", "Rows", "StreamRows", "pack_documents", "segment_inputs"]

DocumentMasking = Literal["padded", "padded without mask", "positions", "mask"]
"""What keeps documents apart: a row each (with a mask of the padding, where the model takes one), or in packed rows
positions that restart, alone or with a mask of four dims."""

_WIDTH_STEP = 64
"""Padded rows are as long as the longest of their batch, rounded up: few widths, so little is compiled again."""


class _Rows:
    """What tells rows from others.

    Attributes:
        kind: what must be the same when a run goes on, besides the tokens.
    """

    documents: Documents
    seq_length: int
    num_tokens: int
    num_rows: int
    kind = ""

    def identity(self) -> dict[str, int]:
        """Numbers, length, and the checksum of the documents."""
        numbers = {"num_rows": self.num_rows} if self.kind else {}
        return {
            "num_tokens": self.num_tokens,
            "seq_length": self.seq_length,
            "checksum": self.documents.checksum,
            **numbers,
        }

    def describe(self) -> dict[str, Any]:
        """The checksum, and how the rows are made."""
        return {"tokens": f"{self.documents.checksum:08x}", **({"rows": self.kind} if self.kind else {})}

    def notes(self) -> str:
        """What was done to documents, in words."""
        return ""


class StreamRows(_Rows):
    """Documents one after the other, cut into rows of `seq_length`. Tokens after the last full row are left out. Every
    token is a target.

    Raises:
        BatchError: there are fewer tokens than one row.
    """

    def __init__(self, documents: Documents, *, seq_length: int) -> None:
        self.documents, self.seq_length, self.num_tokens = documents, seq_length, len(documents.tokens)
        self.num_rows = self.num_tokens // seq_length
        if self.num_rows == 0:
            raise BatchError(
                f"the data holds {self.num_tokens:,} tokens, fewer than one row of {seq_length:,}",
                fix="use more text or a smaller data.seq_length",
            )

    def read(self, rows: Sequence[int], *, batch: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, which equal them: transformers' causal models shift labels."""
        read = [self.documents.read(row * self.seq_length, self.seq_length)[0] for row in rows]
        input_ids = torch.from_numpy(np.stack(read))
        return {"input_ids": input_ids, "labels": input_ids.clone()}


class DocumentRows(_Rows):
    """Rows of documents of which none sees another; see [Note: packed rows].

    Args:
        seq_length: most tokens in a row.
        too_long: what happens to longer documents: "truncate" cuts their end off, "drop" leaves them out. One that has
            no target left is left out.
        padding: the token that fills rows.
        dtype: of a mask of four dims: what the model computes in.

    Raises:
        BatchError: no document is left.
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
        self._padding, self._dtype = padding, dtype
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

    def read(self, rows: Sequence[int], *, batch: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids`, `labels` (-100 where nothing is learned), and what keeps documents apart: `attention_mask` of
        padding, or `position_ids` and, if that is needed, an `attention_mask` [len(rows), 1, width, width], which is
        added to scores.
        """
        width = self._width(batch) if self._packed is None else self.seq_length
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

    def _width(self, batch: Sequence[int]) -> int:
        longest = int(self._lengths[list(batch)].max())
        return min(self.seq_length, -(-longest // _WIDTH_STEP) * _WIDTH_STEP)

    def notes(self) -> str:
        """How many documents were cut, or left out."""
        found = {"truncated": self.num_truncated, "dropped": self.num_dropped}
        return ", ".join(f"{number:,} {what}" for what, number in found.items() if number)


Rows = StreamRows | DocumentRows
"""Rows of a data set, by number. `read` gives some of those of a global `batch` as the model's inputs and labels, int64
[len(rows), width]; `identity` tells them from others, and `describe` says as JSON what must be the same when a run goes
on."""


@dataclass(frozen=True)
class PackedRows:
    """Which documents share a row.

    Attributes:
        documents: [num_documents] int32 numbers of documents, those of one row after the other.
        starts: [num_rows + 1] int64: where each row begins in `documents`, and where the last ends.
    """

    documents: NDArray[np.int32]
    starts: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    def in_row(self, row: int) -> NDArray[np.int32]:
        """The numbers of the documents in a row, in their order."""
        return self.documents[self.starts[row] : self.starts[row + 1]]


def pack_documents(lengths: NDArray[np.integer[Any]], seq_length: int) -> PackedRows:
    """Packs documents into rows of at most `seq_length` tokens: the longest first, each into the fullest row that has
    room for it (best-fit decreasing). The result depends on the lengths alone.

    Documents of one length are placed together: the fullest row with room for one takes as many as it has room for,
    then the next row does.

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
    """The inputs that keep documents of these `lengths`, in each row one after the other, apart."""
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
