"""Patterns over FQNs."""

import difflib
import re
from collections.abc import Iterable, Iterator

__all__ = ["Matcher", "match", "star_numbers"]

_LEAVES = ("weight", "bias")


def match(pattern: str, fqn: str) -> bool:
    """Whether `pattern` matches the whole of `fqn`: `*` is one component, `**` any number, none included."""
    parts = tuple(pattern.split("."))
    states = _start(parts)
    for component in _components(fqn):
        states = _advance(parts, states, component)
    return len(parts) in states


def star_numbers(fqn: str) -> str:
    """`fqn` with `*` for every component that is a number: one name for what all layers have."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn)


def _components(fqn: str) -> list[str]:
    # The model itself has the empty name: it has no component, so only a bare `**` matches it.
    return fqn.split(".") if fqn else []


# A state is the number of parts already matched; several are possible at once only behind a `**`.
_States = frozenset[int]


def _start(parts: tuple[str, ...]) -> _States:
    return frozenset(_through(parts, 0))


def _advance(parts: tuple[str, ...], states: _States, component: str) -> _States:
    following: set[int] = set()
    for state in states:
        if state == len(parts):
            continue
        if parts[state] == "**":
            following.update(_through(parts, state))
        elif parts[state] in ("*", component):
            following.update(_through(parts, state + 1))
    return frozenset(following)


def _through(parts: tuple[str, ...], state: int) -> Iterator[int]:
    """`state` and the states that an empty `**` reaches from it."""
    yield state
    while state < len(parts) and parts[state] == "**":
        state += 1
        yield state


class _Node:
    """A component in the tree of all names; `name` is set where a name ends."""

    __slots__ = ("children", "name")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.name: str | None = None


class Matcher:
    """The names of a model, ready to be matched.

    Names lie in a tree by component, so a pattern visits only the branches it can still match: a plan over 10^5 names
    takes well under a second.

    Args:
        names: FQNs of the model's modules and parameters, in the order in which answers list them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._root = _Node()
        for name in self._names:
            node = self._root
            for component in _components(name):
                node = node.children.setdefault(component, _Node())
            node.name = name

    def governed(self, pattern: str) -> set[str]:
        """The names that `pattern` matches, and the `weight` and `bias` of those that are modules."""
        parts = tuple(pattern.split("."))
        return set(_walk(self._root, parts, _start(parts)))

    def nearest(self, pattern: str) -> list[str]:
        """Patterns like `pattern` that match something."""
        # Layers differ only in their numbers, so there are few distinct names to compare with.
        names = dict.fromkeys(star_numbers(name) for name in self._names)
        if pattern.startswith("**."):
            depth = pattern.count(".")
            names = dict.fromkeys("**." + ".".join(name.split(".")[-depth:]) for name in names)
        return difflib.get_close_matches(pattern, names, n=3)


def _walk(node: _Node, parts: tuple[str, ...], states: _States) -> Iterator[str]:
    if len(parts) in states:
        if node.name is not None:
            yield node.name
        for leaf in _LEAVES:
            child = node.children.get(leaf)
            if child is not None and child.name is not None:
                yield child.name
    for component, child in _children(node, parts, states):
        following = _advance(parts, states, component)
        if following:
            yield from _walk(child, parts, following)


def _children(node: _Node, parts: tuple[str, ...], states: _States) -> Iterable[tuple[str, _Node]]:
    """The children worth a visit: all of them, but for a single state that awaits a name."""
    if len(states) == 1:
        (state,) = states
        if state == len(parts):
            return ()
        if "*" not in parts[state]:
            child = node.children.get(parts[state])
            return () if child is None else ((parts[state], child),)
    return node.children.items()
