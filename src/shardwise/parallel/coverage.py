"""Checks that a checkpoint covers a model. Missing tensors and unlike shapes are errors unless allowed."""

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

logger = logging.getLogger("shardwise.load")

MOST_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Allowed differences between a checkpoint and the model.

    Attributes:
        missing: patterns of parameters that are initialized if the checkpoint lacks them.
        unused: patterns of the checkpoint's tensors that may belong to layers the model does not have.
        mismatched: whether parameters with another shape in the checkpoint are initialized.
    """

    missing: Sequence[str] = ()
    unused: Sequence[str] = ()
    mismatched: bool = False

    @classmethod
    def pop(cls, options: dict[str, Any]) -> Allowed:
        """Takes these options out of the options of `load`: lists of patterns, or True for all names."""
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
    """Raises one error that lists all tensors of the model that the checkpoint lacks. Logs what `allowed` permits.

    Buffers that the checkpoint lacks keep the model's values. Extra tensors of the checkpoint are only logged, as in
    transformers, unless they belong to a layer that the model does not have, or the class is a guess.

    Args:
        names: every name in the model's state; each tied tensor once.
        is_guess: whether neither the user nor the checkpoint names the model's class.

    Raises:
        LoadError: tensors are missing, have another shape or kind, cannot be converted, or belong to further layers.
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
    """Raises `UnsupportedError` if float8 weights have scales beside them, without which their values are wrong."""
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
    """Yields one line about `names`; names that differ only in a number are merged. Yields nothing for no names."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(star_numbers(name), []).append(name)
    shown = [f"{starred} ({len(alike)})" if len(alike) > 1 else alike[0] for starred, alike in groups.items()]
    if shown:
        rest = f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else ""
        yield f"{sum(map(len, groups.values()))} {what}: {', '.join(shown[:MOST_NAMES])}{rest}"


def _is_beyond(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether `name` has an index beyond the end of a module list of the model."""
    places = ((modules.get(parent_of(each)), each.rpartition(".")[2]) for each in upwards(name))
    return any(
        isinstance(owner, nn.ModuleList) and item.isdigit() and int(item) >= len(owner) for owner, item in places
    )


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches `name` or a module that contains it."""
    return any(match(f"{pattern}.**", name) for pattern in patterns)
