"""Finds the integer attributes of modules that count split features, by integers that record their origin.

# [Note: traced sizes]
An attention reshapes by `self.num_heads`, which must be half on a rank with half of the heads. The autograd graph does
not track integers. So while a tiny model is watched, every integer attribute is a `TracedInt`, which carries its
formula through arithmetic into the shapes of operations. The influence of each rank on the resulting dim gives the
value of the formula on a rank. The attributes to divide are those that solve all these equations.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from shardwise.parallel.facts import counts_of
from shardwise.parallel.tensor_parallel import LocalConfig
from shardwise.plan.structure import is_within

_MAX_TRIED = 5_000
_Formula = Callable[[Mapping[str, Fraction]], Fraction]


class TracedInt(int):
    """An integer that carries the formula by which it was computed."""

    names: frozenset[str]  # FQNs of the attributes in the formula
    formula: _Formula  # the value as a function of a rank's part of every attribute

    @classmethod
    def of(cls, name: str, value: int) -> "TracedInt":
        """Returns the attribute called `name`."""
        return cls._build(value, frozenset({name}), lambda parts: value * parts.get(name, Fraction(1)))

    @classmethod
    def _build(cls, value: int, names: frozenset[str], formula: _Formula) -> "TracedInt":
        number = cls(value)
        number.names, number.formula = names, formula
        return number

    def _combine(self, compute: Callable[[Any, Any], Any], other: Any) -> Any:
        plain: Any = int(other) if isinstance(other, TracedInt) else other
        value = compute(int(self), plain)
        if not isinstance(other, int) or type(value) is not int:
            return value
        mine, theirs = self.formula, other.formula if isinstance(other, TracedInt) else lambda parts: Fraction(plain)
        names = self.names | (other.names if isinstance(other, TracedInt) else frozenset())
        return TracedInt._build(value, names, lambda parts: Fraction(compute(mine(parts), theirs(parts))))


for _name, _compute in {
    "mul": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "rmul": operator.mul,
    "radd": operator.add,
    "rsub": lambda a, b: b - a,
    "floordiv": lambda a, b: a // b if b else 0,
    "rfloordiv": lambda a, b: b // a if a else 0,
}.items():
    setattr(TracedInt, f"__{_name}__", functools.partialmethod(TracedInt._combine, _compute))


@dataclass(eq=False)
class SizeConstraint:
    """One dim of an operation's result, to which a traced integer gave its size."""

    size: TracedInt
    out: Tensor
    dim: int


@dataclass(frozen=True)
class Equation:
    """A traced integer's value on every rank: `part` of its full value; None if nothing split depends on it."""

    size: TracedInt
    part: Fraction | None


@contextmanager
def traced_integers(model: nn.Module, layers: Sequence[str]) -> Iterator[None]:
    """Context manager: the integer attributes of the modules of `layers` and of their configs are `TracedInt`s."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, module in model.named_modules():
            if not is_within(name, layers):
                continue
            configured: dict[str, TracedInt] = {}
            for own, value in counts_of(module).items():
                traced = TracedInt.of(f"{name}.{own}", value)
                if own.startswith("config."):
                    configured[own.removeprefix("config.")] = traced
                else:
                    before.append((module, own, getattr(module, own)))
                    setattr(module, own, traced)
            if configured:
                before.append((module, "config", module.config))
                module.config = LocalConfig(module.config, **configured)
        yield
    finally:
        for module, own, value in reversed(before):
            setattr(module, own, value)


MADE = frozenset({"zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"})
"""Functions that make a tensor of a given size."""
_RESHAPED = frozenset({"view", "reshape", "expand", "broadcast_to"})


def size_constraints_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Iterator[SizeConstraint]:
    """Yields the dims whose sizes are traced integers among an operation's arguments."""
    name = getattr(func, "__name__", "")
    values = [*args, *kwargs.values()]
    if name in ("split", "split_with_sizes") and isinstance(out, tuple | list):
        sizes = values[1] if len(values) > 1 else ()
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        for index, piece in enumerate(out):
            size = sizes[index] if isinstance(sizes, list | tuple) else sizes
            if isinstance(size, TracedInt) and piece.shape[dim] == size:
                yield SizeConstraint(size, piece, dim)
    elif isinstance(out, Tensor) and (name in _RESHAPED or name in MADE):
        sizes = [value for value in flat(args) if isinstance(value, int) and not isinstance(value, bool)]
        for dim, size in enumerate(sizes[: out.ndim]):
            if isinstance(size, TracedInt) and out.shape[dim] == size:
                yield SizeConstraint(size, out, dim)


def flat(value: Any) -> Iterator[Any]:
    """Yields the items of nested lists, tuples and dicts that are no list, tuple or dict."""
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from flat(each)
    else:
        yield value


def solve(equations: Sequence[Equation], *, limit: int) -> list[dict[str, Fraction]]:
    """Returns the parts of attributes that solve the equations, best first. Attributes that stay full are left out."""
    distinct = {(_fingerprint(each), int(each.size), each.part): each for each in equations}
    split = [each for each in distinct.values() if each.part not in (None, 1)]
    names = frozenset().union(*(each.size.names for each in split))
    domain = sorted({Fraction(1), *(each.part for each in split if each.part is not None)}, reverse=True)
    systems = [_solve_system(system, domain) for system in _systems(list(distinct.values()), names)]
    if not systems:
        return []
    best = [system[0] for system in systems]
    chosen = [best]
    for position, system in enumerate(systems):
        chosen += [[*best[:position], other, *best[position + 1 :]] for other in system[1:limit]]
    return [{name: part for parts in each for name, part in parts.items()} for each in chosen[:limit]]


def _fingerprint(equation: Equation) -> tuple[str, ...]:
    """Identifies a formula by its names, and by its values for some parts."""
    names = sorted(equation.size.names)
    parts = {name: Fraction(1, prime) for name, prime in zip(names, (2, 3, 5, 7, 11, 13), strict=False)}
    return (*names, str(equation.size.formula(parts)))


def _systems(equations: Sequence[Equation], names: frozenset[str]) -> list[list[Equation]]:
    """Groups the equations about `names` into systems that share no attribute."""
    systems: list[tuple[frozenset[str], list[Equation]]] = []
    for equation in equations:
        about = equation.size.names & names
        if not about:
            continue
        related = [system for system in systems if system[0] & about]
        systems = [system for system in systems if system not in related]
        systems.append(
            (about.union(*(each for each, _ in related)), [equation, *(e for _, own in related for e in own)])
        )
    return [system for _, system in systems]


def _solve_system(equations: Sequence[Equation], domain: Sequence[Fraction]) -> list[dict[str, Fraction]]:
    names = sorted(frozenset().union(*(equation.size.names for equation in equations)))
    if len(domain) ** len(names) > _MAX_TRIED:
        return [{}]
    found = []
    for choice in itertools.product(domain, repeat=len(names)):
        parts = dict(zip(names, choice, strict=True))
        missed = sum(_misses(equation, parts) for equation in equations if equation.part is not None)
        loose = sum(_misses(equation, parts) for equation in equations if equation.part is None)
        split = {name: part for name, part in parts.items() if part != 1}
        found.append((missed, loose, len(split), split))
    found.sort(key=lambda each: each[:3])
    return [split for *_, split in found]


def _misses(equation: Equation, parts: Mapping[str, Fraction]) -> bool:
    return equation.size.formula(parts) != int(equation.size) * (equation.part or 1)
