"""Whether a checkpoint covers a model: what is missing or of another kind is an error unless it is allowed."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import ConfigError, LoadError, did_you_mean
from shardwise.plan.match import match, star_numbers
from shardwise.plan.structure import parent_of, upwards
from shardwise.weights.conversion import Resolution

__all__ = ["Allowed", "check_coverage"]

logger = logging.getLogger("shardwise.load")

MOST_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What a checkpoint may lack, and what it may hold that the model does not have.

    Attributes:
        missing: patterns of parameters that start at random values where the checkpoint has none.
        unused: patterns of the checkpoint's tensors that belong to layers the model does not have.
        mismatched: whether parameters of another shape in the checkpoint start at random values.
    """

    missing: Sequence[str] = ()
    unused: Sequence[str] = ()
    mismatched: bool = False

    @classmethod
    def pop(cls, options: dict[str, Any]) -> Allowed:
        """Takes the options about it out of those of `load`. Raises `ConfigError` where one is of the wrong type."""
        patterns = {}
        for name in ("allow_missing", "allow_unused"):
            given = options.pop(name, ())
            patterns[name] = () if given is False else ("**",) if given is True else given
            if isinstance(given, str) or not all(isinstance(each, str) for each in patterns[name]):
                raise ConfigError(
                    f"{name} is {given!r}", fix=f"write a list of patterns, such as {name}=['score'], or True"
                )
        ignored = bool(options.pop("ignore_mismatched_sizes", False))
        return cls(missing=patterns["allow_missing"], unused=patterns["allow_unused"], mismatched=ignored)


def check_coverage(
    model: PreTrainedModel,
    resolution: Resolution,
    *,
    names: Iterable[str],
    location: str,
    allowed: Allowed,
    is_guess: bool = False,
) -> None:
    """Raises what makes the result another model than the checkpoint's, all of it at once, and logs what is allowed.

    Buffers that the checkpoint lacks are the model's own to make; what it holds beside the model is only logged, as
    transformers does, unless it belongs to a layer that the model has too few of, or nobody has named the class.

    Args:
        names: every name of the model's state, each tied tensor once.
        is_guess: whether neither the user nor the checkpoint names the model's class, which may be one of a part.

    Raises:
        LoadError: tensors are missing, of another shape or kind, cannot be converted, or belong to further layers.
        ConfigError: a pattern of `allowed.missing` fits no parameter of the model.
    """
    parameters = {name: value.dtype for name, value in model.named_parameters(remove_duplicate=False)}
    _check_patterns(allowed.missing, parameters)
    failed = resolution.conversion_errors
    missing = [name for name in resolution.missing if name in parameters and name not in failed]
    modules = dict(model.named_modules())
    prefixes = ("", f"{model.base_model_prefix}.")
    beyond = [
        name for name in resolution.unexpected if is_guess or any(_is_beyond(modules, p + name) for p in prefixes)
    ]
    strange = {
        fqn: f"{fqn}: {lazy.dtype} in the checkpoint, {parameters[fqn]} in the model"
        for fqn, lazy in resolution.tensors.items()
        if fqn in parameters and lazy.dtype.is_floating_point != parameters[fqn].is_floating_point
    }
    other_shapes = [
        f"{fqn}: {list(stored)} in the checkpoint, {list(wanted)} in the model"
        for fqn, (stored, wanted) in resolution.mismatched.items()
    ]
    faults = [
        *_listed("not in the checkpoint", [name for name in missing if not _fits(name, allowed.missing)]),
        *_listed(
            f"{'in modules' if is_guess else 'of layers'} that the model does not have",
            [name for name in beyond if not _fits(name, allowed.unused)],
        ),
        *_listed("of another kind", strange.values()),
        *([] if allowed.mismatched else _listed("of another shape", other_shapes)),
        *_listed("not to be converted", [f"{fqn}: {text.strip().splitlines()[-1]}" for fqn, text in failed.items()]),
    ]
    if faults:
        own = set(names)
        num_fitting = len((own & resolution.tensors.keys()) - strange.keys())
        has_all = f", and {len(beyond)} others of the checkpoint do not" if num_fitting == len(own) else ""
        raise LoadError(
            f"{num_fitting} of {len(own)} tensors fit {type(model).__name__}{has_all}",
            at=location,
            why="\n".join([*faults, *_listed("others of the checkpoint", resolution.unexpected - {*beyond})]),
            fix="\n".join(
                _remedies(_roots(missing, parameters), _roots(beyond, parameters), resolution, is_guess=is_guess)
            ),
        )
    _log(model, resolution, location)


def _listed(what: str, names: Iterable[str]) -> Iterator[str]:
    """One line about `names`, those that differ by a number alone as one; nothing about none."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(star_numbers(name), []).append(name)
    shown = [f"{starred} ({len(alike)})" if len(alike) > 1 else alike[0] for starred, alike in groups.items()]
    if shown:
        rest = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
        yield f"{sum(map(len, groups.values()))} {what}: {', '.join(shown[:MOST_NAMES])}{rest}"


def _roots(names: Sequence[str], parameters: Collection[str]) -> list[str]:
    """`names`, where a module has no other parameters by its own name: the patterns that a user would write."""
    taken = {each for name in {*parameters} - {*names} for each in upwards(parent_of(name))}
    return list(dict.fromkeys([each for each in upwards(name) if each not in taken][-1] for name in names))


def _is_beyond(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether `name` is in an item, with a number too high, of a list of the model's."""
    places = ((modules.get(parent_of(each)), each.rpartition(".")[2]) for each in upwards(name))
    return any(
        isinstance(owner, nn.ModuleList) and item.isdigit() and int(item) >= len(owner) for owner, item in places
    )


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern is that of `name` or of a module that it is in."""
    return any(match(f"{pattern}.**", name) for pattern in patterns)


def _check_patterns(patterns: Sequence[str], parameters: Collection[str]) -> None:
    for pattern in patterns:
        if not any(_fits(name, [pattern]) for name in parameters):
            raise ConfigError(
                f"allow_missing has {pattern!r}, which is no parameter of the model{did_you_mean(pattern, parameters)}",
                fix="name parameters or modules by their full names, with * for one component and ** for any number",
            )


def _remedies(
    missing: Sequence[str], beyond: Sequence[str], resolution: Resolution, *, is_guess: bool
) -> Iterator[str]:
    how = " (auto_class=, or architectures in its config.json)" if is_guess else ""
    yield f"load with the config and the class that the checkpoint was made with{how}"
    for names, option, does in (
        (missing, "allow_missing", "start them at random values"),
        (beyond, "allow_unused", "leave them out"),
    ):
        if names:
            patterns = json.dumps(sorted(names)[:MOST_NAMES])
            yield f"to {does}: {option}={patterns}, or model.{option} in the file of a run"
    if resolution.mismatched:
        yield "to start those of another shape at random values: ignore_mismatched_sizes=True"


def _log(model: nn.Module, resolution: Resolution, location: str) -> None:
    for what, names in (
        ("in the checkpoint but not in the model, and not used", resolution.unexpected),
        ("not in the checkpoint and newly initialised", resolution.missing),
        ("of another shape in the checkpoint and newly initialised", resolution.mismatched),
    ):
        for line in _listed(what, names):
            logger.warning("%s from %s: %s", type(model).__name__, location, line)
