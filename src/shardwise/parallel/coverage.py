"""Whether a checkpoint covers a model: what is missing or of another kind is an error unless it is allowed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import LoadError, UnsupportedError
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
        """Takes the options about it out of those of `load`: lists of patterns, or True for all names."""
        missing, unused = (options.pop(name, None) or () for name in ("allow_missing", "allow_unused"))
        return cls(
            missing=("**",) if missing is True else missing,
            unused=("**",) if unused is True else unused,
            mismatched=bool(options.pop("ignore_mismatched_sizes", False)),
        )


def check_coverage(
    model: PreTrainedModel,
    resolution: Resolution,
    *,
    names: Iterable[str],
    location: str,
    allowed: Allowed,
    is_guess: bool = False,
) -> None:
    """Raises one error for all that the checkpoint lacks of the model, and logs what `allowed` lets pass.

    Buffers that the checkpoint lacks keep the model's own values. Further tensors of the checkpoint are only logged, as
    transformers does, unless they belong to a layer that the model does not have, or nobody has named the class.

    Args:
        names: every name of the model's state, each tied tensor once.
        is_guess: whether neither the user nor the checkpoint names the model's class, which may be one of a part.

    Raises:
        LoadError: tensors are missing, of another shape or kind, cannot be converted, or belong to further layers.
        UnsupportedError: the weights are quantized.
    """
    _check_scales(resolution, location)
    parameters = {name: value.dtype for name, value in model.named_parameters(remove_duplicate=False)}
    failed, modules = resolution.conversion_errors, dict(model.named_modules())
    missing = [name for name in resolution.missing if name in parameters and name not in failed]
    beyond = [
        name
        for name in resolution.unexpected
        if is_guess or _is_beyond(modules, name) or _is_beyond(modules, f"{model.base_model_prefix}.{name}")
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
        wanted = set(names)
        num_fitting = len((wanted & resolution.tensors.keys()) - strange.keys())
        raise LoadError(
            f"{num_fitting} of {len(wanted)} tensors fit {type(model).__name__}",
            at=location,
            why="\n".join([*faults, *_listed("others of the checkpoint", resolution.unexpected - set(beyond))]),
            fix="load with the config and the class that the checkpoint was made with (auto_class=, or architectures\n"
            "in its config.json); allow_missing, allow_unused (model.allow_missing in the file of a run) and\n"
            "ignore_mismatched_sizes say what may differ",
        )
    for what, unfit in (
        ("in the checkpoint but not in the model, and not used", resolution.unexpected),
        ("not in the checkpoint and newly initialised", resolution.missing),
        ("of another shape in the checkpoint and newly initialised", resolution.mismatched),
    ):
        for line in _listed(what, unfit):
            logger.warning("%s from %s: %s", type(model).__name__, location, line)


def _check_scales(resolution: Resolution, location: str) -> None:
    """Raises `UnsupportedError` where float8 weights have scales beside them: without these they are other weights."""
    scales = [name for name in resolution.unexpected if "scale" in name.rpartition(".")[2]]
    narrow = [fqn for fqn, lazy in resolution.tensors.items() if str(lazy.dtype).startswith("torch.float8")]
    if scales and narrow:
        raise UnsupportedError(
            f"a quantized checkpoint ({len(narrow)} float8 tensors, with scales)",
            at=location,
            why=f"{narrow[0]} has to be multiplied by a scale such as {scales[0]}, and the config does not say how",
            fix="load the checkpoint it was quantized from",
        )


def _listed(what: str, names: Iterable[str]) -> Iterator[str]:
    """One line about `names`, those that differ by a number alone as one; nothing about none."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(star_numbers(name), []).append(name)
    shown = [f"{starred} ({len(alike)})" if len(alike) > 1 else alike[0] for starred, alike in groups.items()]
    if shown:
        rest = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
        yield f"{sum(map(len, groups.values()))} {what}: {', '.join(shown[:MOST_NAMES])}{rest}"


def _is_beyond(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether `name` is in an item, with a number too high, of a list of the model's."""
    places = ((modules.get(parent_of(each)), each.rpartition(".")[2]) for each in upwards(name))
    return any(
        isinstance(owner, nn.ModuleList) and item.isdigit() and int(item) >= len(owner) for owner, item in places
    )


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern is that of `name` or of a module that it is in."""
    return any(match(f"{pattern}.**", name) for pattern in patterns)
