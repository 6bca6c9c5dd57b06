"""`Plan`: the rules by which a model is split, as a frozen value that can be printed and parsed.

As text, a plan has one rule per line under the name of its section, and the rule's origin in a comment:

    [parameters]
    model.layers.*.self_attn.q_proj: colwise
    model.layers.*.self_attn.o_proj: rowwise  # structure: writes to the residual

    [inputs]
    model.layers.*.self_attn.alibi: split(1)

Rules before the first section belong to the section that has their style, like those of a dictionary (transformers'
plans).
"""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from shardwise.errors import PlanError, did_you_mean
from shardwise.plan.rule import SECTIONS, STYLES, Rule

_COMPONENTS = {"*": r"[^.]+\.", "**": r"(?:[^.]+\.)*"}


def match(pattern: str, fqn: str) -> bool:
    """Returns whether `pattern` matches all of `fqn`."""
    return _compiled(pattern).fullmatch(_ended(fqn)) is not None


def star_numbers(fqn: str) -> str:
    """Returns `fqn` with `*` for every numeric component: one name for the same module of all layers."""
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
        """Returns the names that `pattern` matches, and the `weight` and `bias` of modules that it matches."""
        matches = _compiled(pattern, leaves=r"(?:weight\.|bias\.)?").fullmatch
        starred = _compiled(star_numbers(pattern), leaves=r"(?:weight\.|bias\.)?").fullmatch
        found = {name for kind, names in self._alike.items() if starred(_ended(kind)) for name in names}
        return found if star_numbers(pattern) == pattern else {name for name in found if matches(_ended(name))}

    def nearest(self, pattern: str) -> list[str]:
        """Returns the patterns similar to `pattern` that match something."""
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


_Kind = TypeVar("_Kind", bound=Rule)
_HEADER = re.compile(r"\[([^\s\]:]*)\]")
FOUND_ANYWAY = frozenset({"local_params", "mla_kv_a_proj"})
"""Styles of transformers that say nothing we do not see: that a module uses local parameters, or keeps its latents."""


@dataclass(frozen=True)
class Plan:
    """Rules in sections. If several rules of a section match a name, the last one governs it.

    Args:
        rules: rules of all sections; grouped by section, in the given order.

    Raises:
        PlanError: two rules of a section have the same pattern.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(rule for kind in SECTIONS for rule in self.section(kind)))
        seen: dict[object, Rule] = {}
        twice = [(seen[_place(rule)], rule) for rule in self.rules if seen.setdefault(_place(rule), rule) is not rule]
        if twice:
            raise PlanError(
                f"a plan has two rules for {', '.join(repr(rule.pattern) for _, rule in twice)}",
                why="\n".join(f'"{first}" and "{second}"' for first, second in twice),
                fix="keep one rule per pattern; plan | other lets the other's rules win",
            )

    def section(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """Returns the rules of one kind."""
        return tuple(rule for rule in self.rules if isinstance(rule, kind))

    @classmethod
    def of(cls, styles: Mapping[str, str], *, source: str = "user") -> "Plan":
        """Returns the plan from patterns to style names, including transformers' style names.

        Raises:
            PlanError: a rule is invalid.
        """
        named = {pattern: style for pattern, style in styles.items() if style not in FOUND_ANYWAY}
        return cls(tuple(Rule.of(pattern, style, source) for pattern, style in named.items()))

    def __or__(self, other: "Plan") -> "Plan":
        """Returns both plans' rules. Those of `other` win, and replace rules of the same section and pattern."""
        replaced = {_place(rule) for rule in other.rules}
        return Plan((*(rule for rule in self.rules if _place(rule) not in replaced), *other.rules))

    def __str__(self) -> str:
        sections = {kind.section: self.section(kind) for kind in SECTIONS}
        return "\n\n".join("\n".join([f"[{name}]", *map(str, own)]) for name, own in sections.items() if own)

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Parses a plan, one rule or section name per line. Blank lines and comments are skipped.

        Raises:
            PlanError: lines that are not rules (reports all), or two rules of a section have the same pattern.
        """
        rules: list[Rule] = []
        problems: list[str] = []
        kind: type[Rule] = Rule
        for number, line in enumerate(text.splitlines(), start=1):
            header = _HEADER.fullmatch(line.strip())
            try:
                if header:
                    kind = _kind_of(header[1])
                elif line.strip() and not line.lstrip().startswith("#"):
                    rules.append(kind.parse(line))
            except PlanError as error:
                problems.append(f"line {number}: {error.summary}" + (f" ({error.why})" if error.why else ""))
        if problems:
            raise PlanError("cannot read the plan", why="\n".join(problems))
        return cls(tuple(rules))

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as a JSON object with a list per section."""
        return {kind.section: [asdict(rule) for rule in self.section(kind)] for kind in SECTIONS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Returns the plan from the object that `to_json` made.

        Raises:
            PlanError: `data` is no such object: a key is unknown or missing, or a value is no text.
        """
        try:
            return cls(tuple(_kind_of(name)(**rule) for name, rules in data.items() for rule in rules))
        except (TypeError, AttributeError) as error:
            raise PlanError("not a plan", why=f"{type(error).__name__}: {error}") from error


def _place(rule: Rule) -> tuple[type[Rule], str]:
    return type(rule), rule.pattern


def _kind_of(section: str) -> type[Rule]:
    kind = next((kind for kind in SECTIONS if kind.section == section), None)
    if kind is None:
        raise PlanError(f"a plan has no section {section!r}{did_you_mean(section, STYLES)}")
    return kind
