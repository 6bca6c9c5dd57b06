"""Source of a split model's weights, and the parameters that are unchanged since they were read.

A checkpoint of adapters leaves out the frozen base weights that can be read again from the source.
"""

from collections.abc import Collection

from torch import Tensor, nn

from shardwise.parameters.registry import Registry, Source, find_parameters, local_part


def note_source(model: nn.Module, registry: Registry, *, digest: str = "", drawn: Collection[str] = ()) -> None:
    """Records that the parameters of a split model have the values of their source.

    Args:
        drawn: names of parameters that have random values instead.
    """
    states = {
        entry.fqn: _state(parameter)
        for _, parameter, entry in find_parameters(model)
        if entry is not None and not parameter.is_meta and entry.fqn not in drawn
    }
    registry.source = Source(str(getattr(model, "name_or_path", "") or ""), digest, states)


def unchanged_names(model: nn.Module, registry: Registry) -> set[str]:
    """Names of this rank's parameters that were not written to since they had the values of their source."""
    source = registry.source
    has_source = bool(source.name or source.digest)
    return {
        entry.fqn
        for _, parameter, entry in (find_parameters(model) if has_source else ())
        if entry is not None and source.states.get(entry.fqn) == _state(parameter)
    }


def _state(parameter: Tensor) -> tuple[int, ...]:
    local = local_part(parameter)
    return local.data_ptr(), local._version, parameter._version
