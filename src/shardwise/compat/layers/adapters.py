"""Adapters around modules that divide themselves: PEFT's own, whose A or B is such a module, too.

Of a column-split module B is divided as its output is, of a row-split one A as its input is, and an embedding's are
replicated. So ranks exchange what has the rank's width, and hidden features nowhere.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.compat.layers.embedding import StandaloneEmbedding
from shardwise.compat.layers.grouped import GroupedProjections
from shardwise.compat.layers.linears import ColumnLinear, RowLinear
from shardwise.compat.layers.random_streams import own_stream
from shardwise.compat.layers.split_module import SplitModule
from shardwise.errors import UnsupportedError
from shardwise.sharding.placement import split_sections

__all__ = ["register_split_layers"]


def register_split_layers(model: nn.Module, config: Any) -> None:
    """Tells PEFT, by the config of an adapter, how modules of `model` that divide themselves are adapted.

    Raises:
        UnsupportedError: the adapter reads full weights.
    """
    if not any(isinstance(module, SplitModule) for module in model.modules()):
        return
    others = (getattr(config, each, False) for each in ("use_dora", "lora_bias"))
    if not hasattr(config, "_register_custom_module") or any(others):
        raise UnsupportedError(
            f"adapters by {type(config).__name__} around modules that divide themselves",
            why="only the sum of what A and B multiply is computed from parts",
            fix="use LoRA, without biases of its own and variants such as DoRA",
        )
    config._register_custom_module(_layers())


@functools.cache
def _layers() -> dict[type[nn.Module], type[nn.Module]]:
    theirs = importlib.import_module("peft.tuners.lora.layer")
    linear = type("SplitLinear", (_Divided, theirs.Linear), {"__module__": __name__})
    embedding = type("SplitEmbedding", (_Replicated, theirs.Embedding), {"__module__": __name__})
    return {ColumnLinear: linear, RowLinear: linear, GroupedProjections: linear, StandaloneEmbedding: embedding}


class _Divided:
    """Mixin of PEFT's adapter of a linear."""

    lora_A: Any  # noqa: N815 - PEFT's
    lora_B: Any  # noqa: N815

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        out: Any = module.out_features
        return module.in_features, out if isinstance(out, int) else out[0] + 2 * out[1]

    @property
    def parameter_name(self) -> str:
        """The base's weight."""
        return "weight_qkv" if isinstance(self.get_base_layer(), GroupedProjections) else "weight"  # type: ignore[attr-defined]

    @torch.no_grad()
    def update_layer(self, adapter_name: str, *args: Any, **options: Any) -> None:
        """Adds an adapter, which PEFT makes in full, after the same numbers on every rank, and keeps this rank's part.

        Communicates: nothing.
        """
        super().update_layer(adapter_name, *args, **options)  # type: ignore[misc]
        base: Any = self.get_base_layer()  # type: ignore[attr-defined]
        first, last = self.lora_A[adapter_name], self.lora_B[adapter_name]
        if isinstance(base, RowLinear):
            self.lora_A[adapter_name] = _first_of(base, first)
            is_partial, whole = base.sequence_dim is not None or not base.reduces, last
        else:
            self.lora_B[adapter_name] = _last_of(base, last)
            is_partial, whole = base.sequence_dim is not None, first
        whole.partial_parameters = tuple(whole._parameters) if is_partial else ()

    def merge(self, *args: Any, **options: Any) -> None:
        """As PEFT's, into this rank's part of one weight.

        Raises:
            UnsupportedError: the base has several, or one in parts.
        """
        if self.parameter_name != "weight":
            raise _not_in_place(self)
        super().merge(*args, **options)  # type: ignore[misc]

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """As PEFT's, of modules that may return several values."""
        own: Any = self
        if own.disable_adapters and own.merged:
            own.unmerge()
        out, base = own.base_layer(x, *args, **options), own.get_base_layer()
        is_part = base.input_is_split if isinstance(base, RowLinear) else base.sequence_dim is not None
        for name in () if own.disable_adapters or own.merged else own.active_adapters:
            if name in own.lora_A:
                with own_stream(own.lora_dropout[name], base._split) if is_part else nullcontext():
                    given = own._cast_input_dtype(own.lora_dropout[name](x), own.lora_A[name].weight.dtype)
                out = _sum(out, own.lora_B[name](own.lora_A[name](given)), own.scaling[name])
        return out


def _not_in_place(wrapper: Any) -> UnsupportedError:
    return UnsupportedError(
        f"merging adapters into the weights of a {type(wrapper.get_base_layer()).__name__}",
        why="a rank's part of the adapter is no part of what is added to its weight",
        fix='write the merged model with shardwise.export_pretrained(model, directory, adapter="merged")',
    )


def _first_of(base: RowLinear, full: nn.Linear) -> RowLinear:
    options: dict[str, Any] = {"input_is_split": base.input_is_split, "reduces": base.reduces}
    options |= {"sequence_dim": base.sequence_dim, "reduce_dtype": base.reduce_dtype, "dtype": full.weight.dtype}
    made = RowLinear(base.in_features, full.out_features, base.mesh, bias=False, init_weight=nn.init.zeros_, **options)
    made.add_parameter("weight", full.weight, base.placements["weight"], device=full.weight.device)
    made.padded_width = base.padded_width
    return made


def _last_of(base: Any, full: nn.Linear) -> SplitModule:
    options: dict[str, Any] = {"gathers": base.gathers, "sequence_dim": base.sequence_dim, "bias": False}
    options |= {"reduce_dtype": base.reduce_dtype, "dtype": full.weight.dtype, "init_weight": nn.init.zeros_}
    width, device = full.in_features, full.weight.device
    if isinstance(base, ColumnLinear):
        column = ColumnLinear(width, base.out_features, base.mesh, **options)
        column.add_parameter("weight", full.weight, base.placements["weight"], device=device)
        column.padded_width = base.padded_width
        return column
    options |= {"copies": base.copies, "num_heads": base.num_heads, "fused": True}
    grouped = GroupedProjections(width, base.out_features, base.mesh, **options)
    grouped.add_parameter("weight_qkv", full.weight, split_sections(0, grouped.splits), device=device)
    return grouped


def _sum(out: Any, added: Any, scaling: float) -> Any:
    if isinstance(out, tuple) and not isinstance(added, tuple):
        return _sum(out[0], added, scaling), *out[1:]  # the second is a bias
    if isinstance(out, tuple):
        return tuple(_sum(*pair, scaling) for pair in zip(out, added, strict=True))
    return (out + added * scaling).to(out.dtype)


class _Replicated:
    """Mixin of PEFT's adapter of an embedding."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.num_embeddings, module.embedding_dim

    def update_layer(self, adapter_name: str, *args: Any, **options: Any) -> None:
        """As PEFT's; where the output is a part of the sequence, gradients are parts, too."""
        super().update_layer(adapter_name, *args, **options)  # type: ignore[misc]
        own: Any = self
        if own.get_base_layer().sequence_dim is not None:
            for each in (own.lora_embedding_A, own.lora_embedding_B):
                each.partial_parameters = tuple(each.keys())

    def merge(self, *args: Any, **options: Any) -> None:
        """Refuses, with UnsupportedError."""
        raise _not_in_place(self)

    def forward(self, ids: Tensor, *args: Any, **options: Any) -> Tensor:
        """As PEFT's, of the rows that this rank puts out."""
        own: Any = self
        if own.disable_adapters and own.merged:
            own.unmerge()
        base = own.get_base_layer()
        out, ids = own.base_layer(ids, *args, **options), base.own_ids(ids)
        for name in () if own.disable_adapters or own.merged else own.active_adapters:
            if name in own.lora_embedding_A:
                rows = F.embedding(ids, own.lora_embedding_A[name].T, base.padding_row)
                out = _sum(out, rows @ own.lora_embedding_B[name].T, own.scaling[name])
        return out
