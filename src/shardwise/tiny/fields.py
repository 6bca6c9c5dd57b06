"""Reads fields of configurations under any of their names, and walks nested configurations."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from transformers import PreTrainedConfig


def sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """`config` and every configuration inside it, depth first."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from sub_configs(value)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a field is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of `config` itself under their own names, private ones left out."""
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def read_field(config: PreTrainedConfig, name: str) -> Any:
    """A field or property under its own or an alias's name; None if there is none.

    Reads past `__getattribute__`, which refuses fields that differ between layers.
    """
    name = config.attribute_map.get(name, name)
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def layer_overrides(config: PreTrainedConfig) -> dict[int, Mapping[str, Any]]:
    """Layer -> the fields in which it differs from the rest, for configurations that differ by layer."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(index): fields for index, fields in config.to_dict()["per_layer_config"].items()}
