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
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.data.batch import IGNORED
from shardwise.data.documents import TARGET, Documents
from shardwise.errors import BatchError

__all__ = ["Apart", "DocumentRows", "Rows", "StreamRows", "pack_documents", "segment_inputs"]

Apart = Literal["padded", "padded without mask", "positions", "mask"]
"""What keeps documents apart: a row each (with a mask of the padding, where the model takes one), or in packed rows
positions that restart, alone or with a mask of four dims."""

_NUM_SAMPLES = 64
_WIDTH_STEP = 64
"""Padded rows are as long as the longest of their batch, rounded up: few widths, so little is compiled again."""


class StreamRows:
    """Documents one after the other, cut into rows of `seq_length`, dropping the rest.

    Args:
        tokens: [num_tokens] uint32, as `Documents` has them; which are marked as targets does not matter.

    Raises:
        BatchError: there are fewer tokens than one row.
    """

    def __init__(self, tokens: NDArray[np.uint32], *, seq_length: int) -> None:
        self.tokens, self.seq_length, self.num_tokens = tokens, seq_length, len(tokens)
        self.num_rows = len(tokens) // seq_length
        if self.num_rows == 0:
            raise BatchError(
                f"the data holds {len(tokens):,} tokens, fewer than one row of {seq_length:,}",
                fix="use more text or a smaller data.seq_length",
            )

    def read(self, rows: Sequence[int], *, batch: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, which equal them: transformers' causal models shift labels."""
        starts = [row * self.seq_length for row in rows]
        read = np.stack([self.tokens[start : start + self.seq_length] & ~TARGET for start in starts])
        input_ids = torch.from_numpy(read.astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def identity(self) -> dict[str, int]:
        """Number and length."""
        return {"num_tokens": self.num_tokens, "seq_length": self.seq_length}

    def describe(self) -> dict[str, Any]:
        """A checksum of samples."""
        sampled = 0
        for start in range(0, len(self.tokens), max(1, len(self.tokens) // _NUM_SAMPLES)):
            sampled = zlib.crc32((self.tokens[start : start + self.seq_length] & ~TARGET).tobytes(), sampled)
        return {"tokens": f"{sampled:08x}"}

    def notes(self) -> str:
        """Nothing is left out but the rest."""
        return ""


class DocumentRows:
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
        apart: Apart = "padded",
        padding: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.documents, self.seq_length, self.apart = documents, seq_length, apart
        self._padding, self._dtype = padding, dtype
        ends = documents.ends.astype(np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        lengths = ends - starts
        is_long = lengths > seq_length
        kept = (documents.first_targets < seq_length) & (~is_long if too_long == "drop" else True)
        self.num_truncated, self.num_dropped = int((is_long & kept).sum()), int((~kept).sum())
        if not kept.any():
            raise BatchError(
                f"none of {len(ends):,} documents is left",
                why=f"all have more than {seq_length:,} tokens and are dropped, or their first target comes later",
                fix="use a larger data.seq_length, or shorter prompts",
            )
        self._starts, self._lengths = starts[kept], np.minimum(lengths[kept], seq_length)
        self.num_tokens = int(self._lengths.sum())
        self._rows: Sequence[Sequence[int]]
        if apart in ("positions", "mask"):
            self._rows = pack_documents(self._lengths, seq_length)
        else:
            self._rows = [(number,) for number in range(len(self._lengths))]
        self.num_rows = len(self._rows)

    def read(self, rows: Sequence[int], *, batch: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids`, `labels` (-100 where nothing is learned), and what keeps documents apart: `attention_mask` of
        padding, or `position_ids` and, if that is needed, an `attention_mask` [len(rows), 1, width, width], which is
        added to scores.
        """
        is_packed = self.apart in ("positions", "mask")
        width = self.seq_length if is_packed else self._width(batch)
        input_ids = np.full((len(rows), width), self._padding, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
        lengths = []
        for place, row in enumerate(rows):
            at = 0
            for number in self._rows[row]:
                tokens, is_target = self.documents.read(int(self._starts[number]), int(self._lengths[number]))
                input_ids[place, at : at + len(tokens)] = tokens
                labels[place, at : at + len(tokens)] = np.where(is_target, tokens, IGNORED)
                at += len(tokens)
            lengths.append([int(self._lengths[number]) for number in self._rows[row]])
        found = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        return found | segment_inputs(lengths, width, apart=self.apart, dtype=self._dtype)

    def _width(self, batch: Sequence[int]) -> int:
        longest = max(int(self._lengths[self._rows[row][0]]) for row in batch)
        return min(self.seq_length, -(-longest // _WIDTH_STEP) * _WIDTH_STEP)

    def identity(self) -> dict[str, int]:
        """Numbers, length, and the checksum of the documents."""
        return {
            "num_tokens": self.num_tokens,
            "num_rows": self.num_rows,
            "seq_length": self.seq_length,
            "checksum": self.documents.checksum,
        }

    def describe(self) -> dict[str, Any]:
        """The checksum, and how the rows are made."""
        kind = "padded" if self.apart.startswith("padded") else "packed"
        return {"tokens": f"{self.documents.checksum:08x}", "rows": kind}

    def notes(self) -> str:
        """How many documents were cut, or left out."""
        found = {"truncated": self.num_truncated, "dropped": self.num_dropped}
        return ", ".join(f"{number:,} {what}" for what, number in found.items() if number)


Rows = StreamRows | DocumentRows
"""Rows of a data set, by number. `read` gives some of those of a global `batch` as the model's inputs and labels, int64
[len(rows), width]; `identity` tells them from others, and `describe` says as JSON what must be the same when a run goes
on."""


def pack_documents(lengths: NDArray[np.int64], seq_length: int) -> list[list[int]]:
    """Rows of documents by number, none longer than `seq_length`: the longest first, each into the fullest row that has
    room for it (best-fit decreasing). It depends on the lengths alone.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room -> rows that have it
    rooms: list[int] = []  # those, sorted
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), seq_length
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(number)
        if (left := room - length) > 0:
            if left not in with_room:
                bisect.insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    return rows


def segment_inputs(
    lengths: Sequence[Sequence[int]], width: int, *, apart: Apart, dtype: torch.dtype = torch.float32
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
