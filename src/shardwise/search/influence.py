"""Which elements of a layer's parameters reach which input features of its row products.

# [Note: structure by influence]
Cut the input features of a product (an attention's output projection, an MLP's down projection) into one run for each
rank and ask autograd which parameter elements each run depends on. The exact zeros of the gradients are the answer.
Where the runs depend on different elements of a weight, that weight can be split: every rank keeps what its run depends
on. Elements that several runs depend on are held by several ranks (key/value heads shared by query heads), and a
parameter all of which reaches everything is replicated (a q/k norm, a latent projection). Nothing here knows attention
from a state-space scan, or in which order a fused weight holds its sections: the graph knows.

A product whose runs depend on different rows of some earlier weight is a row product, and where it sits, a region is
left. Products inside a scan feed back into it; once found, their outputs are cut and the rest is asked again. With all
of them cut, what is split must reach the layer's output no more; a product where that fails is none (a router reads the
features of an attention's output, which go on to the residual stream in full).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.search.trace import Layer, Use, watch

__all__ = ["RequiredIndices", "RowProduct", "find_row_products", "run_of"]

_MAX_PASSES = 5
_MAX_SHARED = 0.5
"""Up to which part of a weight all ranks may need, besides their own."""


@dataclass(frozen=True, kw_only=True)
class RequiredIndices:
    """What each rank must hold of a parameter, along one dim.

    Attributes:
        dim: which dim.
        size: its extent.
        ranks: for each rank the indices that its features depend on.
    """

    dim: int
    size: int
    ranks: tuple[frozenset[int], ...]

    @property
    def shared(self) -> int:
        """How many indices more than one rank needs."""
        return sum(count > 1 for count in Counter(itertools.chain.from_iterable(self.ranks)).values())

    @property
    def is_split(self) -> bool:
        """Whether every rank needs less than all."""
        everything = frozenset().union(*self.ranks)
        return all(len(indices) < len(everything) for indices in self.ranks)

    def united(self, other: RequiredIndices) -> RequiredIndices:
        """What a rank must hold for both, which are along the same dim."""
        ranks = tuple(mine | theirs for mine, theirs in zip(self.ranks, other.ranks, strict=True))
        return RequiredIndices(dim=self.dim, size=self.size, ranks=ranks)


@dataclass(eq=False)
class RowProduct:
    """A product where a region is left, and what each rank needs for its run of input features.

    Attributes:
        layer: FQN of the layer.
        parameter: FQN of the weight whose input features are split along `input_dim`.
        required_indices: for every parameter of the layer that can be split for it, what each rank needs.
        reenters: whether a later row product of the same region depends on the sum.
    """

    layer: str
    parameter: str
    module: str
    input_dim: int
    features: int
    required_indices: dict[str, RequiredIndices]
    reenters: bool = False
    uses: list[Use] = field(default_factory=list)


def find_row_products(
    model: nn.Module, batch: Mapping[str, Any], *, tp_size: int
) -> tuple[list[RowProduct], list[Layer]]:
    """The row products of every layer, and the layers as watched with all of their outputs detached.

    Args:
        model: a tiny model in eval mode, eager attention and experts.
        tp_size: for how many ranks.
    """
    banned: set[str] = set()
    for _ in range(_MAX_PASSES):
        found, layers = _search(model, batch, tp_size, frozenset(banned))
        # Where the last one is none, others before it may seem to be none for its sake.
        open_ended = {name for layer in layers for name in list(_open_ended(layer, found))[-1:]}
        if not open_ended:
            break
        banned |= open_ended
    cut = frozenset(found)
    layers = watch(model, batch, cut=cut, thorough=True)
    if any(not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear) for name in found):
        with_zeroed_outputs = {layer.fqn: layer for layer in watch(model, batch, cut=cut, with_zeroed_outputs=True)}
        for layer in layers:
            layer.with_zeroed_outputs = with_zeroed_outputs.get(layer.fqn)
    _mark_reentries(list(found.values()), layers)
    return list(found.values()), layers


def _search(
    model: nn.Module, batch: Mapping[str, Any], tp_size: int, banned: frozenset[str]
) -> tuple[dict[str, RowProduct], list[Layer]]:
    """Row products by their weights, and the layers with all of them cut."""
    found: dict[str, RowProduct] = {}
    columns: dict[str, set[str]] = {}
    layers = watch(model, batch)
    max_shared = 0.0
    for _ in range(_MAX_PASSES):
        new = [each for layer in layers for each in _accept(layer, tp_size, found, columns, max_shared, banned)]
        if new:
            layers = watch(model, batch, cut=frozenset(found))
        elif max_shared:
            break
        else:  # what is clean is found; what is left may share some (the one key of a multi-query attention)
            max_shared = _MAX_SHARED
    return found, layers


def _open_ended(layer: Layer, found: Mapping[str, RowProduct]) -> Iterator[str]:
    """Row products whose split weights reach the layer's output past all row products: no region can be left there."""
    own = [product for product in found.values() if product.layer == layer.fqn]
    if not own or not layer.outputs or layer.outputs[0].grad_fn is None:
        return
    names = [name for name, value in layer.parameters.items() if value.requires_grad and value.ndim > 1]
    total = (layer.outputs[0] * torch.rand(layer.outputs[0].shape, generator=torch.Generator().manual_seed(1))).sum()
    gradients = torch.autograd.grad(total, [layer.parameters[n] for n in names], retain_graph=True, allow_unused=True)
    reaching = {
        name
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None and bool((gradient != 0).any()) and name not in found
    }
    order = {use.parameter: position for position, use in enumerate(layer.uses)}
    for product in sorted(own, key=lambda product: order.get(product.parameter, -1)):
        if any(name in reaching and not required.shared for name, required in product.required_indices.items()):
            yield product.parameter


def _accept(
    layer: Layer,
    tp_size: int,
    found: dict[str, RowProduct],
    columns: dict[str, set[str]],
    max_shared: float,
    banned: frozenset[str],
) -> list[RowProduct]:
    """Adds the layer's new row products to `found`, those with the largest splits first."""
    own = layer.parameters
    products = [
        use for use in layer.uses if use.parameter not in found and use.parameter in own and use.parameter not in banned
    ]
    outputs = {use.parameter: 1 - use.input_dim if own[use.parameter].ndim == 2 else None for use in products}
    candidates: list[tuple[int, RowProduct]] = []
    merged: dict[str, RowProduct] = {}
    for use in products:
        required_indices = _required_indices(use, own, tp_size)
        clean = [
            name
            for name, required in required_indices.items()
            if name != use.parameter
            and own[name].ndim > 1
            and required.shared <= max_shared * required.size
            and (name not in outputs or outputs[name] in (None, required.dim))
            and name in {each.parameter for each in layer.uses}
        ]
        if not clean:
            continue
        if use.parameter in merged:  # one weight used several times (experts): the union of what its uses need
            _unite(merged[use.parameter], required_indices)
            continue
        product = RowProduct(
            layer.fqn, use.parameter, use.module, use.input_dim, use.x.shape[-1], required_indices, uses=[use]
        )
        merged[use.parameter] = product
        candidates.append((sum(own[name].numel() for name in clean), product))
    accepted = []
    for _, product in sorted(candidates, key=lambda each: -each[0]):
        splits = {
            name
            for name, required in product.required_indices.items()
            if required.shared <= max_shared * required.size and own[name].ndim > 1
        }
        taken = columns.setdefault(layer.fqn, set())
        rows = {name for name, other in found.items() if other.layer == layer.fqn}
        if product.parameter in taken or splits & rows or _conflicts(product, found):
            continue
        found[product.parameter] = product
        taken |= splits
        accepted.append(product)
    return accepted


def _conflicts(product: RowProduct, found: Mapping[str, RowProduct]) -> bool:
    """Whether a product of the same layer splits one of its weights in another way: by heads, not inside of them."""
    for other in found.values():
        for name in (
            product.required_indices.keys() & other.required_indices.keys() if other.layer == product.layer else ()
        ):
            ours, theirs = product.required_indices[name], other.required_indices[name]
            if ours.shared or theirs.shared:
                continue
            if ours.dim != theirs.dim or ours.united(theirs).shared:
                return True
    return False


def _required_indices(use: Use, own: Mapping[str, Tensor], tp_size: int) -> dict[str, RequiredIndices]:
    """For every parameter of the layer the dim along which the ranks' needs differ most, if they differ."""
    if not use.x.requires_grad or use.x.shape[-1] < tp_size:
        return {}
    own = {name: value for name, value in own.items() if value.requires_grad}
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(use.x.shape, generator=generator) + 0.5
    weights *= torch.randint(0, 2, use.x.shape, generator=generator) * 2 - 1
    masks = []
    for run in range(tp_size):
        start, stop = run_of(use.x.shape[-1], tp_size, run)
        total = (use.x[..., start:stop].float() * weights[..., start:stop]).sum()
        gradients = torch.autograd.grad(total, list(own.values()), retain_graph=True, allow_unused=True)
        masks.append([None if gradient is None else gradient != 0 for gradient in gradients])
    required_indices = {}
    for position, (name, parameter) in enumerate(own.items()):
        found = [mask[position] for mask in masks]
        if any(mask is None for mask in found):
            continue
        required = _best_dim(parameter, found)
        if required is not None:
            required_indices[name] = required
    # A bias whose true gradient is zero (a key's: the softmax does not see it) shows rounding noise; its weight knows.
    return {
        name: required
        for name, required in required_indices.items()
        if not name.endswith(".bias") or f"{name[:-5]}.weight" in required_indices or f"{name[:-5]}.weight" not in own
    }


def _best_dim(parameter: Tensor, masks: list[Tensor]) -> RequiredIndices | None:
    best: RequiredIndices | None = None
    for dim in range(parameter.ndim):
        others = [other for other in range(parameter.ndim) if other != dim]
        needed = [mask.sum(others) > 0 if others else mask for mask in masks]
        ranks = tuple(frozenset(torch.nonzero(each).flatten().tolist()) for each in needed)
        required = RequiredIndices(dim=dim, size=parameter.shape[dim], ranks=ranks)
        if required.is_split and (best is None or required.shared < best.shared):
            best = required
    return best


def _unite(product: RowProduct, required_indices: Mapping[str, RequiredIndices]) -> None:
    for name, required in required_indices.items():
        known = product.required_indices.get(name)
        if known is not None and known.dim == required.dim:
            product.required_indices[name] = known.united(required)


def run_of(size: int, tp_size: int, index: int) -> tuple[int, int]:
    """The run of `size` features that belongs to rank `index`."""
    run = -(-size // tp_size)
    return min(size, index * run), min(size, (index + 1) * run)


def _mark_reentries(products: list[RowProduct], layers: list[Layer]) -> None:
    """A product re-enters where another product that needs the same split weights depends on its sum."""
    uses = {use.parameter: use for layer in layers for use in layer.uses}
    for product in products:
        shared = [
            other
            for other in products
            if other is not product
            and other.layer == product.layer
            and set(other.required_indices) & set(product.required_indices)
        ]
        out = uses[product.parameter].out if product.parameter in uses else None
        for other in shared:
            use = uses.get(other.parameter)
            if out is None or use is None or not use.x.requires_grad:
                continue
            (gradient,) = torch.autograd.grad(use.x.sum(), [out], retain_graph=True, allow_unused=True)
            product.reenters = product.reenters or (gradient is not None and bool((gradient != 0).any()))
