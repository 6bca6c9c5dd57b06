"""State of a learning-rate scheduler, some lists of which have one entry per optimizer group.

Groups differ between layouts, and between the stages of one layout. Their options are stored by parameter; these lists
are stored as rank 0 has them. So ranks compare only the rest. When a scheduler is loaded with its optimizer, the
entries are taken from the groups' options.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.errors import LoadError

_OPTIONS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Lists of torch's schedulers, and the option of a group that each repeats."""
_EQUAL = ("min_lrs", "lr_lambdas")
"""Lists that no option repeats: they fit other groups where all entries are equal."""
_INNER = "_schedulers"


def common_state(state: Any) -> Any:
    """The part of `state` that must be equal on every rank, whatever groups its optimizer has."""
    if not isinstance(state, Mapping):
        return state
    found = {name: value for name, value in state.items() if name not in _OPTIONS}
    for name in found.keys() & {*_EQUAL}:
        found[name] = found[name][:1] if _are_equal(found[name]) else found[name]
    if _INNER in found:
        found[_INNER] = [common_state(each) for each in found[_INNER]]
    return found


def state_for_groups(state: Any, groups: Sequence[Mapping[str, Any]], *, is_inner: bool = False) -> Any:
    """Converts `state` to the state of a scheduler whose optimizer has these `groups`.

    Args:
        is_inner: whether another scheduler drives this one: its lists may be of an earlier step.

    Raises:
        LoadError: a list has different entries for groups that have changed.
    """
    if not isinstance(state, Mapping):
        return state
    found = dict(state)
    for name in found.keys() & _OPTIONS.keys():
        values = [group.get(_OPTIONS[name]) for group in groups]
        if None not in values and not (is_inner and len(found[name]) == len(groups)):
            found[name] = [value.clone() if isinstance(value, Tensor) else value for value in values]
    for name in found.keys() & {*_EQUAL}:
        if len(found[name]) != len(groups):
            if not _are_equal(found[name]):
                raise LoadError(
                    f"the scheduler's {name} differ, and were of other parameter groups",
                    why=f"{len(found[name])} entries for what are {len(groups)} groups now",
                    fix="load it with the layout it was saved with, or build the scheduler again",
                )
            found[name] = found[name][:1] * len(groups)
    if _INNER in found:
        found[_INNER] = [state_for_groups(each, groups, is_inner=True) for each in found[_INNER]]
    return found


def _are_equal(values: Sequence[Any]) -> bool:
    return all(each == values[0] for each in values)
