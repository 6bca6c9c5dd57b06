"""Guards `state_dict()`, so that a rank's part is never taken for the full tensor."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import UnsupportedError
from shardwise.parameters.canonical import take_parts
from shardwise.parameters.registry import ParameterEntry, Registry, entry_of, named_entries, registry_of
from shardwise.runtime.modes import with_attributes

_EXPORT = (
    "use shardwise.full_state_dict(model), or shardwise.export_pretrained(model, directory) to save, on every rank"
)
_RESIZE = "resize the unsplit model before shardwise.parallelize, or export and load it again"


def guard_state_dict(model: nn.Module, registry: Registry) -> None:
    """Makes `state_dict()` raise if tp or pp splits the model, and `load_state_dict` take parts of full ones.

    Parameters that only the data axes shard stay `DTensor`s. Every module that owns a split parameter raises, so
    `model.model.state_dict()` raises too.
    """
    _keep_tied(model)
    if registry.mesh.shape.world_size == 1:
        return
    name, shape = type(model).__name__, registry.plan.shape
    over = [f"{axis}={shape.size(axis)}" for axis in ("pp", "tp") if shape.size(axis) > 1]

    def refuse(*_: Any) -> None:
        if registry.reads_names:
            return
        raise UnsupportedError(
            f"state_dict() of a {name} that is split over {' and '.join(over)}",
            why="this rank holds parts of its parameters, which would be taken for full ones",
            fix=_EXPORT,
        )

    held = registry.plan.names_held(registry.mesh.coord("pp"))
    fqns = [
        fqn for fqn in (*registry.entries, *registry.tied) if registry.entry(fqn).split is not None or fqn not in held
    ]
    for owner in sorted({fqn.rpartition(".")[0] for fqn in fqns}):
        model.get_submodule(owner).register_state_dict_pre_hook(refuse)
    model.register_load_state_dict_pre_hook(split_state)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.resize_token_embeddings = partial(_refuse, "resize_token_embeddings", _RESIZE)
            module.save_pretrained = partial(_refuse, "save_pretrained", _EXPORT)
            module.push_to_hub = partial(_refuse, "push_to_hub", _EXPORT)
            if registry.stages is not None:
                module.tie_weights = lambda *_, **__: None  # stages already share what is tied


def local_state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the `state_dict()` of a split model with this rank's parts, for code that saves and loads per rank."""
    with with_attributes(registry_of(model), reads_names=True):
        return model.state_dict(*args, **kwargs)


def split_state(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Hook of `load_state_dict`: replaces full tensors in a state dict by this rank's parts; removes other stages'."""
    entries = named_entries(module)
    if any(entry.stage_coords for entry in entries.values()):
        _choose_names(module, state, prefix, entries)
    take_parts(module, state, prefix)


def _choose_names(module: nn.Module, state: dict[str, Any], prefix: str, entries: Mapping[str, ParameterEntry]) -> None:
    """Keeps only the names in `state` under which this rank's stages know parameters."""
    given = {id(entry): state[f"{prefix}{name}"] for name, entry in entries.items() if f"{prefix}{name}" in state}
    held = {name for name, value in module.named_parameters(remove_duplicate=False) if entry_of(value) is not None}
    for name, entry in entries.items():
        state.pop(f"{prefix}{name}", None)
        if name in held and id(entry) in given:
            state[f"{prefix}{name}"] = given[id(entry)]


def _keep_tied(model: nn.Module) -> None:
    """Restores ties after `load_state_dict(assign=True)`, which gives each name its own parameter."""
    tied: list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = []

    def before(module: nn.Module, *_: Any) -> None:
        names: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    names.setdefault(parameter, []).append((owner, name))
        tied[:] = [(parameter, group) for parameter, group in names.items() if len(group) > 1]

    def after(module: nn.Module, _: Any) -> None:
        for old, group in tied:
            present = [owner._parameters[name] for owner, name in group]
            shared = next((parameter for parameter in reversed(present) if parameter is not old), old)
            for owner, name in group:
                owner._parameters[name] = shared
        tied.clear()

    model.register_load_state_dict_pre_hook(before)
    model.register_load_state_dict_post_hook(after)


def _refuse(what: str, fix: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(f"{what} of a split model", why="this rank holds parts of its parameters", fix=fix)
