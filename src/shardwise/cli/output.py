"""A standard output that may go away: full, closed, or piped into a reader that has seen enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

__all__ = ["Output", "lasting_stdout"]


class Output:
    """A stream that takes whatever is written to it, also when it can pass nothing on any more.

    Attributes:
        is_lasting: whether the work goes on when the reader of a pipe ends: where the text is all there is, it ends,
            with a `BrokenPipeError`.
        error: why it passes nothing on; None while it does.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_lasting = False
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Pass `text` on."""
        with self._guarded():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:  # a terminal or a pipe that knows fewer characters
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        with self._guarded():
            self._stream.flush()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is buffered still has to go somewhere when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError) and not self.is_lasting:
                raise
            self.error = error
            print(f"cannot write the output: {error.strerror}", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_stdout() -> redirect_stdout[Any]:
    """Puts an `Output` in place of `sys.stdout`; where that was closed, one that drops everything."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - to the end of the process
    return redirect_stdout(Output(sys.stdout))
