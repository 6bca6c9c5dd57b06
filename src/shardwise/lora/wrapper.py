"""PEFT's wrapper around a split model: corrects or refuses methods that need full tensors."""

from typing import Any, NoReturn

from torch import Tensor, nn

from shardwise.errors import UnsupportedError
from shardwise.parameters.at_rest import forget_unreduced, reshard
from shardwise.parameters.canonical import names_only
from shardwise.parameters.registry import Registry
from shardwise.runtime.adapter_facts import find_model
from shardwise.runtime.linear import apply_mixin

_BY_ENTRY = ("linear", "cat")
"""Ways to combine adapters in which an entry of the new A or B is made of the same entry of the others."""


def guard_wrapper(model: nn.Module, registry: Registry) -> None:
    """Corrects the methods of PEFT's wrapper that would be wrong when ranks hold parts, or makes them raise. Does not
    change other models.

    Communicates: nothing.
    """
    if find_model(model) is not model and registry.mesh.shape.world_size > 1:
        apply_mixin(model, _SplitWrapper, _split_registry=registry)
        apply_mixin(model.get_submodule("base_model"), _SplitTuner, _split_registry=registry)


def named_biases(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Biases that an adapter's config trains and that PEFT misses, because they are not called `bias`: modules list
    them in `bias_names`.
    """
    kind = getattr(config, "bias", "none")
    return {
        f"{name}.{bias}": module.get_parameter(bias)
        for name, module in model.named_modules()
        if kind == "all" or (kind == "lora_only" and name.endswith(".base_layer"))
        for bias in getattr(module, "bias_names", ())
        if getattr(module, bias, None) is not None
    }


class _SplitWrapper:
    """Mixin of a `PeftModel`."""

    _split_registry: Registry

    def load_adapter(self, *args: Any, **options: Any) -> Any:
        """Like PEFT; each rank keeps its part of the file's tensors."""
        with names_only(self._split_registry):
            return super().load_adapter(*args, **options)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **options: Any) -> NoReturn:
        """Raises: PEFT would write a rank's parts as if they were full tensors."""
        raise UnsupportedError(
            "save_pretrained of adapters in a split model",
            why="this rank holds parts of its parameters, and other ranks may not have called",
            fix="call shardwise.export_pretrained(model, directory) on every rank: it writes the same files",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Like torch, for sharded parameters and unreduced gradients; see [Note: left gathered]."""
        inner: Any = find_model(self)  # type: ignore[arg-type]
        reshard(inner)
        forget_unreduced(inner)
        super().zero_grad(set_to_none)  # type: ignore[misc]


class _SplitTuner:
    """Mixin of a `LoraModel`."""

    _split_registry: Registry

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        combination_type: str = "svd",
        *args: Any,
        **options: Any,
    ) -> Any:
        """Like PEFT, if the combination of parts is the part of the combination."""
        mesh = self._split_registry.mesh
        if mesh.size("pp") > 1 or mesh.data_size > 1 or combination_type not in _BY_ENTRY:
            raise UnsupportedError(
                f"adapters combined by {combination_type!r} in a model that is split over {mesh.shape}",
                why="it is computed from full tensors, of which each rank holds a part",
                fix="combine them in the unsplit model, and load what it saves; over tp alone use "
                + " or ".join(f"combination_type={each!r}" for each in _BY_ENTRY),
            )
        return super().add_weighted_adapter(  # type: ignore[misc]
            adapters, weights, adapter_name, combination_type, *args, **options
        )
