"""Patterns over FQNs: `*` is one component, `**` any number of components, including none."""

import difflib
import functools
import re
from collections.abc import Iterable

_COMPONENTS = {"*": r"[^.]+\.", "**": r"(?:[^.]+\.)*"}


def match(pattern: str, fqn: str) -> bool:
    """Whether `pattern` matches all of `fqn`."""
    return _compiled(pattern).fullmatch(_ended(fqn)) is not None


def star_numbers(fqn: str) -> str:
    """`fqn` with `*` for every numeric component: one name for the same module of all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn)


class Matcher:
    """Index of a model's names for matching.

    Layers differ only in their numbers, so there are few distinct names apart from numbers. A pattern is matched with
    one name of each kind, and with every name only if it contains numbers. A plan over 10^5 names takes well under a
    second.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._alike: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            self._alike.setdefault(star_numbers(name), []).append(name)

    def governed(self, pattern: str) -> set[str]:
        """The names that `pattern` matches, and the `weight` and `bias` of matching modules."""
        matches = _compiled(pattern, leaves=r"(?:weight\.|bias\.)?").fullmatch
        starred = _compiled(star_numbers(pattern), leaves=r"(?:weight\.|bias\.)?").fullmatch
        found = {name for kind, names in self._alike.items() if starred(_ended(kind)) for name in names}
        return found if star_numbers(pattern) == pattern else {name for name in found if matches(_ended(name))}

    def nearest(self, pattern: str) -> list[str]:
        """Patterns similar to `pattern` that match something."""
        names = dict.fromkeys(self._alike)
        if pattern.startswith("**."):
            depth = pattern.count(".")
            names = dict.fromkeys("**." + ".".join(name.split(".")[-depth:]) for name in names)
        return difflib.get_close_matches(pattern, names, n=3)


@functools.cache
def _compiled(pattern: str, *, leaves: str = "") -> re.Pattern[str]:
    parts = (_COMPONENTS.get(part) or re.escape(part) + r"\." for part in pattern.split("."))
    return re.compile("".join(parts) + leaves)


def _ended(fqn: str) -> str:
    """`fqn` with a dot after every component. The model itself has the empty name: no component."""
    return f"{fqn}." if fqn else ""
