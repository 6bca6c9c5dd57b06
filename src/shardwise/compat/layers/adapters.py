"""LoRA on parallel layers: PEFT's adapters, with A or B split too.

On a column-split layer, B is split like the layer's output. On a row-split layer, A is split like the layer's input. On
an embedding, A and B are replicated. So ranks exchange only tensors of the adapter's rank, never hidden features.
Importing this module requires PEFT.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Embedding, Linear
from torch import Tensor, nn

from shardwise.compat.layers.grouped import GroupedProjections
from shardwise.compat.layers.linears import ColumnLinear, RowLinear, StandaloneEmbedding
from shardwise.compat.layers.split_module import SplitModule
from shardwise.errors import UnsupportedError
from shardwise.runtime.context import SplitContext
from shardwise.runtime.forward_state import device_rng
from shardwise.runtime.modes import has_dropout
from shardwise.sharding.placement import split_sections


def register_split_layers(model: nn.Module, config: Any) -> None:
    """Registers our adapter classes for the parallel layers of `model` in a PEFT config."""
    if not any(isinstance(module, SplitModule) for module in model.modules()):
        return
    variants = (getattr(config, name, False) for name in ("use_dora", "lora_bias"))
    if not hasattr(config, "_register_custom_module") or any(variants):
        raise UnsupportedError(
            f"adapters by {type(config).__name__} around parallel layers",
            why="only the product of A and B is computed from parts",
            fix="use LoRA, without biases of its own and variants such as DoRA",
        )
    layers = {ColumnLinear: ColumnLora, GroupedProjections: ColumnLora, RowLinear: RowLora}
    config._register_custom_module({**layers, StandaloneEmbedding: EmbeddingLora})


class _SplitLora(Linear):
    """PEFT's adapter of a linear, on a split linear. The base may return a tuple."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        out: Any = module.out_features
        return module.in_features, out if isinstance(out, int) else out[0] + 2 * out[1]

    def _drops_alike(self, base: Any) -> bool:
        """Returns whether tp ranks drop the same inputs, because all of them have the full input."""
        return base.sequence_dim is None

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """Adds the adapters' products to the base's output."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        base = self.get_base_layer()
        out = self.base_layer(x, *args, **options)
        for name in () if self.disable_adapters or self.merged else self.active_adapters:
            if name in self.lora_A:
                first, last, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
                with nullcontext() if self._drops_alike(base) else _own_stream(dropout, base._split):
                    dropped = self._cast_input_dtype(dropout(x), first.weight.dtype)
                out = _add(out, last(first(dropped)), self.scaling[name])
        return out


class ColumnLora(_SplitLora):
    """LoRA on a column-split linear: A is replicated, B is split like the base's output."""

    @property
    def parameter_name(self) -> str:
        """The base's weight."""
        return "weight_qkv" if isinstance(self.get_base_layer(), GroupedProjections) else "weight"

    @torch.no_grad()
    def update_layer(self, adapter_name: str, *args: Any, **options: Any) -> None:
        """Adds an adapter. PEFT draws the full adapter, the same on every rank; this rank keeps its part of B."""
        super().update_layer(adapter_name, *args, **options)
        base, first, full = self.get_base_layer(), self.lora_A[adapter_name], self.lora_B[adapter_name]
        same: dict[str, Any] = {name: getattr(base, name) for name in ("gathers", "sequence_dim")}
        same |= {"bias": False, "dtype": full.weight.dtype, "init_weight": nn.init.zeros_}
        if isinstance(base, GroupedProjections):
            same |= {"copies": base.copies, "num_heads": base.num_heads}
            grouped = GroupedProjections(full.in_features, base.out_features, base.mesh, **same)
            last: SplitModule = grouped
            name, split = "weight_qkv", split_sections(0, grouped.splits)
        else:
            last = ColumnLinear(full.in_features, base.out_features, base.mesh, **same)
            name, split = "weight", base.placements["weight"]
        last.add_parameter(name, full.weight, split, device=full.weight.device)
        last.padded_width = base.padded_width
        self.lora_B[adapter_name] = last
        first.partial_parameters = ("weight",) if base.sequence_dim is not None else ()


class RowLora(_SplitLora):
    """LoRA on a row-split linear: A is split like the base's input, B is replicated."""

    def _drops_alike(self, base: Any) -> bool:
        return not base.input_is_split

    @torch.no_grad()
    def update_layer(self, adapter_name: str, *args: Any, **options: Any) -> None:
        """Adds an adapter. PEFT draws the full adapter, the same on every rank; this rank keeps its part of A."""
        super().update_layer(adapter_name, *args, **options)
        base, full, last = self.get_base_layer(), self.lora_A[adapter_name], self.lora_B[adapter_name]
        same: dict[str, Any] = {name: getattr(base, name) for name in ("input_is_split", "sequence_dim")}
        same |= {"bias": False, "dtype": full.weight.dtype, "init_weight": nn.init.zeros_}
        first = RowLinear(base.in_features, full.out_features, base.mesh, **same)
        first.add_parameter("weight", full.weight, base.placements["weight"], device=full.weight.device)
        first.padded_width = base.padded_width
        self.lora_A[adapter_name] = first
        last.partial_parameters = ("weight",) if base.sequence_dim is not None else ()


class EmbeddingLora(Embedding):
    """LoRA on a split embedding: A and B are replicated."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.num_embeddings, module.embedding_dim

    def update_layer(self, adapter_name: str, *args: Any, **options: Any) -> None:
        """Adds an adapter. Marks its gradients as partial sums if the base returns this rank's part of the sequence."""
        super().update_layer(adapter_name, *args, **options)
        if self.get_base_layer().sequence_dim is not None:
            for parameters in (self.lora_embedding_A, self.lora_embedding_B):
                parameters.partial_parameters = tuple(parameters.keys())

    def forward(self, ids: Tensor, *args: Any, **options: Any) -> Tensor:
        """Adds the adapters' rows to the rows that this rank returns. Args: ids int `[b, s]`."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        base = self.get_base_layer()
        out, ids = self.base_layer(ids, *args, **options), base.own_ids(ids)
        for name in () if self.disable_adapters or self.merged else self.active_adapters:
            if name in self.lora_embedding_A:
                rows = F.embedding(ids, self.lora_embedding_A[name].T, base.padding_row)
                out = _add(out, rows @ self.lora_embedding_B[name].T, self.scaling[name])
        return out


def _add(out: Any, product: Any, scaling: float) -> Any:
    if isinstance(out, tuple):
        return tuple(_add(*pair, scaling) for pair in zip(out, product, strict=True))
    return (out + product * scaling).to(out.dtype)


@contextmanager
def _own_stream(module: nn.Module, context: SplitContext) -> Iterator[None]:
    """Context manager: `module` drops different elements on each tp rank, which then have equal states again."""
    if context.tp.size == 1 or not (module.training and has_dropout(module)):
        yield
        return
    seed = int(torch.empty((), dtype=torch.int64).random_()) + 1 + context.tp.coord
    with device_rng(context.device, seed):
        yield
