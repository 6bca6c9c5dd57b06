"""Every error Shardwise raises on purpose.

    ShardwiseError
    ├── MeshError          (ValueError)           mesh shapes, ranks, world size
    ├── PlanError          (ValueError)           plans and their rules
    ├── LayoutError        (ValueError)           how a tensor is stored on the ranks
    ├── ConfigError        (ValueError)           user configuration, unknown keys
    ├── BatchError         (ValueError)           what a training step was fed
    ├── GradientError      (ArithmeticError)      losses and gradients that are infinite or NaN
    ├── LoadError          (OSError)              files: missing, corrupt, mismatched
    ├── UnsupportedError   (NotImplementedError)  a request that Shardwise does not support
    ├── VerificationError  (ArithmeticError)      a split that computes other numbers
    └── RankError          (RuntimeError)         another rank failed

An error says what went wrong and, if known, the place, the violated rule with its numbers, and the remedy.

    cannot split model.layers.0.self_attn.k_proj over tp=8
      at:  rule "model.layers.*.self_attn.k_proj: colwise"
      why: 6 key-value heads do not divide among 8 ranks, and 8 is not a multiple of 6
      fix: use tp_size 1, 2, 3 or 6
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_CONTINUATION = "\n" + " " * len("  why: ")


class ShardwiseError(Exception):
    """Base of every error Shardwise raises.

    Args:
        summary: What went wrong, with the values.
        at: place: a rule, an FQN, a file, a rank.
        why: The rule that was broken.
        fix: What the user can do.
    """

    # Only `summary` goes into `args`; the other parts live in the instance's `__dict__`. Pickle restores an exception
    # from exactly these two, so an error keeps its parts on the way out of a child process.
    def __init__(self, summary: str, *, at: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(summary)
        self.summary = summary
        self.at = at
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        parts = (("  at:  ", self.at), ("  why: ", self.why), ("  fix: ", self.fix))
        lines = [label + text.replace("\n", _CONTINUATION) for label, text in parts if text]
        return "\n".join([self.summary, *lines])


class MeshError(ShardwiseError, ValueError):
    """A mesh shape, rank or world size is invalid."""


class PlanError(ShardwiseError, ValueError):
    """A plan or one of its rules cannot be applied."""


class LayoutError(ShardwiseError, ValueError):
    """A tensor's layout is inconsistent or does not fit the tensor."""


class ConfigError(ShardwiseError, ValueError):
    """User configuration is invalid."""


class BatchError(ShardwiseError, ValueError):
    """A training step cannot use the batch."""


class GradientError(ShardwiseError, ArithmeticError):
    """A loss or a gradient is infinite or NaN."""


class LoadError(ShardwiseError, OSError):
    """A file is missing, corrupt, or not the expected one."""


class UnsupportedError(ShardwiseError, NotImplementedError):
    """Shardwise does not support the request."""


class VerificationError(ShardwiseError, ArithmeticError):
    """A split model computes other numbers than the unsplit one."""


class RankError(ShardwiseError, RuntimeError):
    """Another rank failed."""


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `"1 rank"`, `"2 ranks"`, `"1,000 batches"`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def sized(num_bytes: int) -> str:
    """Returns a number of bytes in words: `"345.6 MiB"`, from 1 GiB on `"1.23 GiB"`."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def listed(names: Sequence[str], most: int) -> str:
    """Returns at most that many names, and how many there are besides: `"a, b and 3 more"`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Returns the ending of an "unknown word" message: `" (did you mean 'x'?)"`, or `""` if no candidate is close."""
    known = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f" (did you mean {known[close[0]]!r}?)" if close else ""


def one_line(error: BaseException, *, limit: int | None = None) -> str:
    """Returns the text of another library's error in one line of at most `limit` characters, for use in our errors."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) or not str(error) else str(error)
    return " ".join(text.split())[:limit]


@contextmanager
def as_error(
    error_class: type[ShardwiseError],
    summary: str,
    *kinds: type[Exception],
    at: str | None = None,
    fix: str | None = None,
    limit: int | None = None,
) -> Iterator[None]:
    """Context manager: converts another library's error of the given kinds, by default of any, to one of ours. Its text
    of at most `limit` characters becomes the reason. An `OSError` that names a file says where, else `at` does.
    """
    caught = kinds or (Exception,)
    try:
        yield
    except ShardwiseError:
        raise
    except caught as error:
        why = getattr(error, "strerror", None) or one_line(error, limit=limit)  # an OSError's without number and file
        file = getattr(error, "filename", None)
        raise error_class(summary, at=file if isinstance(file, str) else at, why=why, fix=fix) from error
