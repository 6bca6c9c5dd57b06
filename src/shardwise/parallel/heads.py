"""Sets head counts on attention modules to the number of this rank's heads."""

import logging
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from shardwise.parallel.facts import KEY_VALUE_HEAD_NAMES, QUERY_HEAD_NAMES, names_read
from shardwise.plan.decision import ParameterPlan
from shardwise.plan.structure import Heads, parent_of
from shardwise.sharding.placement import Split

logger = logging.getLogger("shardwise.plan")

_ALIGNED = 8
"""Grouped products read rows of a multiple of 16 bytes: that many elements of the narrowest dtypes."""


class LocalConfig:
    """A module's view of the model's config, with some values replaced.

    Some attention forwards read head counts from `self.config`. The model's config itself is shared and saved, so it
    must not change.
    """

    def __init__(self, config: Any, **values: Any) -> None:
        self.__dict__.update(values, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)


def apply_local_heads(modules: Mapping[str, nn.Module], heads: Mapping[str, tuple[Heads, Heads]]) -> None:
    """Sets the head counts of every split attention module to this rank's."""
    for name, (full, local) in heads.items():
        module, own_class = modules[name], cast(Any, type(modules[name]))
        queries = (full.num_heads, local.num_heads)
        keys = (full.num_key_value_heads, local.num_key_value_heads)
        groups = (queries[0] // keys[0], queries[1] // keys[1])
        counts = dict.fromkeys(QUERY_HEAD_NAMES, queries) | dict.fromkeys(KEY_VALUE_HEAD_NAMES, keys)
        for own, (before, after) in (counts | {"num_key_value_groups": groups}).items():
            if vars(module).get(own) == before:
                setattr(module, own, after)
        for own in counts.keys() & names_read(own_class) if getattr(module, "config", None) is not None else ():
            _set_in_config(module, own, counts[own][1])


def apply_local_attributes(modules: Mapping[str, nn.Module], attributes: Mapping[str, int]) -> None:
    """Sets the attributes that a plan divides to this rank's values, on the module or on its view of the config."""
    for fqn, value in attributes.items():
        owner, _, name = fqn.rpartition(".")
        if owner in modules:
            setattr(modules[owner], name, value)
        else:
            _set_in_config(modules[owner.removesuffix(".config")], name, value)


def apply_expert_widths(modules: Mapping[str, nn.Module], parameters: Mapping[str, ParameterPlan]) -> None:
    """Makes stacked experts run one after another if a rank's part has strides that the grouped product does not
    support.
    """
    for fqn, planned in parameters.items():
        owner, placement = parent_of(fqn), planned.placement
        module = modules[owner]
        if not isinstance(placement, Split) or len(planned.shape) != 3:
            continue
        implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
        sizes = set(placement.local_sizes)
        if implementation == "grouped_mm" and any(size % _ALIGNED for size in sizes):
            logger.warning("%s runs its experts one after another: ranks have widths of %s", owner, sorted(sizes))
            _set_in_config(module, "_experts_implementation", "eager")


def _set_in_config(module: nn.Module, name: str, value: Any) -> None:
    """Sets a value in the module's view of its config."""
    if not isinstance(module.config, LocalConfig):
        setattr(module, "config", LocalConfig(module.config))  # noqa: B010 - torch types it a Module
    module.config.__dict__[name] = value
