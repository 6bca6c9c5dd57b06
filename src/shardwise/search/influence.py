"""Finds which elements of a layer's parameters influence which input features of its row products.

# [Note: structure by influence]
The input features of a product (an attention's output projection, an MLP's down projection) are cut into one run per
rank, and exact zeros in gradients tell on which parameter elements each run depends: its rank keeps these. Elements on
which several runs depend are held by several ranks (key/value heads shared by query heads). A parameter whose every
element influences every run is replicated (a q/k norm, a latent projection). This works alike for attention and
state-space scans, and for any order of sections in a fused weight.

A product whose runs depend on different rows of an earlier weight is a row product, and a region ends there. Products
inside a scan feed back into it, so found products are cut and the search repeats. With all of them cut, split features
must not reach the layer's output. A product for which that fails is no row product (a router reads the features of an
attention's output, which also go to the residual stream in full).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plan.structure import parent_of
from shardwise.search.trace import Layer, Use, watch


def gradients_of(total: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of a sum; None for an input on which it does not depend. Keeps the graph."""
    if not total.requires_grad or not inputs:
        return [None] * len(inputs)
    return torch.autograd.grad(total, list(inputs), retain_graph=True, allow_unused=True)


def depends(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Returns whether any output depends on any input."""
    return any(map(is_nonzero, gradients_of(weighted_sum(outputs), inputs)))


def is_nonzero(gradient: Tensor | None) -> bool:
    """Returns whether any element is not zero."""
    return gradient is not None and bool(gradient.any())


def weighted_sum(values: Sequence[Tensor]) -> Tensor:
    """Returns the sum of all elements with distinct weights, so that it depends on everything that they depend on."""
    return weighted_sums(values, 1)[0]


def weighted_sums(values: Sequence[Tensor], num_parts: int) -> list[Tensor]:
    """Returns for every rank the weighted sum of its run of the last dim."""
    totals = [torch.zeros(()) for _ in range(num_parts)]
    for value in values:
        weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(1)) + 0.5
        weighted = value.float() * weights
        for rank in range(num_parts):
            own = weighted if num_parts == 1 else weighted[..., features_of(rank, value.shape[-1], num_parts)]
            totals[rank] = totals[rank] + own.sum()
    return totals


def features_of(rank: int, size: int, num_parts: int) -> slice:
    """Returns a rank's run of `size` features."""
    run = -(-size // num_parts)
    return slice(min(size, rank * run), min(size, (rank + 1) * run))


_MAX_PASSES = 5
_MAX_SHARED = 0.5  # up to which part of a weight all ranks may need, besides their own


@dataclass(frozen=True, kw_only=True)
class RequiredIndices:
    """What each rank must hold of a tensor along one dim: the indices on which its features depend."""

    dim: int
    size: int
    ranks: tuple[frozenset[int], ...]

    @classmethod
    def along(cls, dim: int, masks: Sequence[Tensor]) -> "RequiredIndices":
        """Returns the required indices along `dim`, from masks of the elements on which each rank's features depend."""
        others = [other for other in range(masks[0].ndim) if other != dim]
        needed = (mask.sum(others) if others else mask for mask in masks)
        ranks = tuple(frozenset(torch.nonzero(each).flatten().tolist()) for each in needed)
        return cls(dim=dim, size=masks[0].shape[dim], ranks=ranks)

    @property
    def needed(self) -> frozenset[int]:
        """The indices that any rank needs."""
        return frozenset().union(*self.ranks)

    @property
    def shared(self) -> int:
        """Number of indices that several ranks need."""
        return sum(count > 1 for count in Counter(itertools.chain.from_iterable(self.ranks)).values())

    @property
    def is_split(self) -> bool:
        """Returns whether every rank needs less than all indices."""
        return all(len(indices) < len(self.needed) for indices in self.ranks)

    def united(self, other: "RequiredIndices") -> "RequiredIndices":
        """Returns what a rank must hold for both tensors along the same dim."""
        ranks = tuple(mine | theirs for mine, theirs in zip(self.ranks, other.ranks, strict=True))
        return RequiredIndices(dim=self.dim, size=self.size, ranks=ranks)


@dataclass(eq=False)
class RowProduct:
    """A product at which a region ends, and what each rank needs for its run of input features."""

    layer: str
    parameter: str  # the weight whose input features are split along `input_dim`
    module: str
    input_dim: int
    features: int
    required_indices: dict[str, RequiredIndices]  # of every parameter of the layer that can be split for this product
    reenters: bool = False  # whether a later row product of the same region depends on the sum


def find_row_products(
    model: nn.Module, batch: Mapping[str, Any], *, num_parts: int
) -> tuple[list[RowProduct], list[Layer]]:
    """Returns the row products of every layer of a tiny model, and the layers as watched with all their outputs
    detached.

    The model is in eval mode, with eager attention and experts.
    """
    banned: set[str] = set()
    for _ in range(_MAX_PASSES):
        search = _Search(num_parts, banned)
        layers = search.run(model, batch)
        # Where the last one is none, others before it may seem to be none for its sake.
        open_ended = {name for layer in layers for name in _open_ended(layer, search.of_layer(layer))[-1:]}
        if not open_ended:
            break
        banned |= open_ended
    found, cut = list(search.found.values()), frozenset(search.found)
    layers = watch(model, batch, cut=cut, thorough=True)
    if not all(is_linear_weight(model, name) for name in cut):
        zeroed = {layer.fqn: layer for layer in watch(model, batch, cut=cut, with_zeroed_outputs=True)}
        for layer in layers:
            layer.with_zeroed_outputs = zeroed.get(layer.fqn)
    uses = {use.parameter: use for layer in layers for use in layer.uses}
    for product in found:
        product.reenters = any(
            depends([uses[other.parameter].x], [uses[product.parameter].out])
            for other in found
            if other is not product
            and other.layer == product.layer
            and other.required_indices.keys() & product.required_indices.keys()
            and {other.parameter, product.parameter} <= uses.keys()
        )
    return found, layers


class _Search:
    """Row products by their weights, found in passes: each pass cuts those found before."""

    def __init__(self, num_parts: int, banned: Iterable[str]) -> None:
        self.found: dict[str, RowProduct] = {}
        self._num_parts, self._banned = num_parts, frozenset(banned)
        self._columns: dict[str, set[str]] = {}  # by layer, what its row products split
        self._max_shared = 0.0

    def run(self, model: nn.Module, batch: Mapping[str, Any]) -> list[Layer]:
        """Finds the row products; returns the layers with all of them cut."""
        layers = watch(model, batch)
        for _ in range(_MAX_PASSES):
            before = len(self.found)
            for layer in layers:
                self._accept(layer)
            if len(self.found) > before:
                layers = watch(model, batch, cut=frozenset(self.found))
            elif self._max_shared:
                break
            else:  # what is clean is found; what is left may share some (the one key of a multi-query attention)
                self._max_shared = _MAX_SHARED
        return layers

    def of_layer(self, layer: Layer) -> list[RowProduct]:
        """Returns the row products of one layer."""
        return [product for product in self.found.values() if product.layer == layer.fqn]

    def _accept(self, layer: Layer) -> None:
        """Adds the layer's new row products, those with the largest splits first."""
        columns = self._columns.setdefault(layer.fqn, set())
        for product in self._candidates(layer):
            splits = {name for name in product.required_indices if self._is_split(name, product, layer)}
            rows = {each.parameter for each in self.of_layer(layer)}
            if product.parameter in columns or splits & rows:
                continue
            self.found[product.parameter] = product
            columns |= splits

    def _candidates(self, layer: Layer) -> list[RowProduct]:
        """Products whose ranks need different parts of a weight that multiplies, those with most elements first."""
        own, found = layer.parameters, dict[str, tuple[int, RowProduct]]()
        excluded = self._banned | self.found.keys()
        uses = [use for use in layer.uses if use.parameter in own and use.parameter not in excluded]
        output_dims = {use.parameter: 1 - use.input_dim for use in uses if own[use.parameter].ndim == 2}
        for use in uses:
            product = RowProduct(
                layer=layer.fqn,
                parameter=use.parameter,
                module=use.module,
                input_dim=use.input_dim,
                features=use.x.shape[-1],
                required_indices=_required_indices(use, own, self._num_parts),
            )
            split = [
                name
                for name, required in product.required_indices.items()
                if name != use.parameter
                and self._is_split(name, product, layer)
                and output_dims.get(name, required.dim) == required.dim
                and any(name == other.parameter for other in layer.uses)
            ]
            if split and use.parameter not in found:
                found[use.parameter] = sum(own[name].numel() for name in split), product
            elif split:  # one weight used several times (experts): the union of what its uses need
                known = found[use.parameter][1].required_indices
                for name, required in product.required_indices.items():
                    if name in known and known[name].dim == required.dim:
                        known[name] = known[name].united(required)
        return [product for _, product in sorted(found.values(), key=lambda each: -each[0])]

    def _is_split(self, name: str, product: RowProduct, layer: Layer) -> bool:
        """Returns whether ranks need parts of a matrix with little enough overlap."""
        required = product.required_indices[name]
        return layer.parameters[name].ndim > 1 and required.shared <= self._max_shared * required.size


def is_linear_weight(model: nn.Module, name: str) -> bool:
    """Returns whether a parameter is the weight of a linear, including transformers' `Conv1D`."""
    module = model.get_submodule(parent_of(name))
    return name.endswith(".weight") and (isinstance(module, nn.Linear) or hasattr(module, "nf"))


def _open_ended(layer: Layer, products: Sequence[RowProduct]) -> list[str]:
    """Row products, in order, whose split weights reach the layer's output past all others: no region ends there."""
    rows = {product.parameter for product in products}
    names = [n for n, value in layer.parameters.items() if value.requires_grad and value.ndim > 1 and n not in rows]
    gradients = gradients_of(weighted_sum(layer.outputs[:1]), [layer.parameters[name] for name in names])
    reaching = {name for name, gradient in zip(names, gradients, strict=True) if is_nonzero(gradient)}
    order = {use.parameter: position for position, use in enumerate(layer.uses)}
    return [
        product.parameter
        for product in sorted(products, key=lambda product: order.get(product.parameter, -1))
        if any(name in reaching and not required.shared for name, required in product.required_indices.items())
    ]


def _required_indices(use: Use, own: Mapping[str, Tensor], num_parts: int) -> dict[str, RequiredIndices]:
    """Returns by parameter of the layer the ranks' needs along the dim where they differ most, if they differ."""
    if not use.x.requires_grad or use.x.shape[-1] < num_parts:
        return {}
    names = [name for name, value in own.items() if value.requires_grad]
    parameters = [own[name] for name in names]
    gradients = [gradients_of(total, parameters) for total in weighted_sums([use.x], num_parts)]
    found = {}
    for name, each in zip(names, zip(*gradients, strict=True), strict=True):
        masks = [gradient != 0 for gradient in each if gradient is not None]
        dims = [RequiredIndices.along(dim, masks) for dim in range(own[name].ndim)] if len(masks) == num_parts else []
        split = [required for required in dims if required.is_split]
        if split:
            found[name] = min(split, key=lambda required: required.shared)
    # A bias whose true gradient is zero (a key's: the softmax does not see it) shows rounding noise; its weight knows.
    weights = {name: f"{name.removesuffix('.bias')}.weight" for name in found if name.endswith(".bias")}
    return {name: each for name, each in found.items() if weights.get(name) not in names or weights[name] in found}
