"""What a block's ranks depend on: where it is entered, which inputs and sizes are a rank's, what is added after it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from shardwise.plan.structure import ModelFacts, is_within, parent_of
from shardwise.search.influence import RequiredIndices, RowProduct, run_of
from shardwise.search.trace import Layer, ModuleCall
from shardwise.search.traced_sizes import SizeConstraint

__all__ = [
    "Reachability",
    "find_added",
    "find_bypassing_identities",
    "find_entries",
    "find_sliced_inputs",
    "gradients_of",
    "hidden_name",
]

_MAX_ADDED = 2


class Reachability:
    """The influence of one block of one layer.

    Attributes:
        model: the tiny model.
        layer: as watched thoroughly, with the outputs of its row products detached.
        group: the row products of the block.
        required_indices: what each rank must hold of the other parameters.
        tp_size: number of ranks.
        others: the row products of the layer's other blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: Layer,
        group: Sequence[RowProduct],
        required_indices: Mapping[str, RequiredIndices],
        tp_size: int,
        *,
        others: Sequence[RowProduct],
    ) -> None:
        self.model, self.layer, self.group, self.required_indices, self.tp_size = (
            model,
            layer,
            group,
            required_indices,
            tp_size,
        )
        self.parameters = layer.parameters
        self.others = others
        self.bare = [each for each in group if not _is_linear_weight(model, each.parameter)]

    def size_constraints(self) -> Iterator[tuple[SizeConstraint, Fraction | None]]:
        """Every size that traced integers gave, with the part that a rank has of it; None where none depends on it."""
        for constraint in self.layer.size_constraints:
            part = self._part(constraint.out, constraint.dim)
            if constraint.source is not None and part is not None:
                source = self._part(*constraint.source)
                part = part / source if source else None
            yield constraint, part

    def needs(self, tensor: Tensor, dim: int) -> tuple[frozenset[int], ...] | None:
        """For each rank the indices of `tensor` along `dim` that it depends on; None where a rank depends on none."""
        found = []
        for mask in self._masks.get(id(tensor), ()):
            if mask is None:
                return None
            others = [other for other in range(mask.ndim) if other != dim % mask.ndim]
            found.append(frozenset(torch.nonzero(mask.sum(others) if others else mask).flatten().tolist()))
        return tuple(found) if found and all(found) else None

    def input_needs(self, call: ModuleCall, name: str) -> tuple[int, tuple[frozenset[int], ...]] | None:
        """The dim of an input along which the ranks need different indices, with those; None where there is none."""
        value = call.named[name]
        for dim in range(value.ndim):
            ranks = self.needs(value, dim)
            if ranks is not None and RequiredIndices(dim=dim, size=value.shape[dim], ranks=ranks).is_split:
                return dim, ranks
        return None

    def depends_on_split(self, value: Tensor) -> bool:
        """Whether `value` is computed from parameters that the block splits."""
        split = [self.parameters[name] for name in self.required_indices if self.parameters[name].requires_grad]
        if not value.requires_grad or not split:
            return False
        return any(_nonzero(gradient) for gradient in gradients_of(value.sum(), split))

    def bypassing_inputs(self, module: str) -> frozenset[str] | None:
        """The inputs of `module` that reach the layer's outputs past the (detached) row products: they bypass a region.

        None where its hidden states, the first input, do so: then it is no region. Neither is a module that holds other
        blocks' row products: they need regions of their own.
        """
        if any(is_within(other.module, (module,)) for other in self.others):
            return None
        # Where the region is left at the output of all, products may be weighted before: zeroed, they add nothing.
        layer = (
            self.layer.with_zeroed_outputs if self.bare and self.layer.with_zeroed_outputs is not None else self.layer
        )
        calls = [call for call in layer.calls if call.fqn == module]
        total = _weighted_sum([value for value in layer.outputs if value.requires_grad and value.grad_fn is not None])
        found: set[str] = set()
        for call in calls:
            inputs = [value for value in call.inputs if value.requires_grad]
            if not inputs:
                return None
            names = {id(value): name for name, value in call.named.items()}
            for value, gradient in zip(inputs, gradients_of(total, inputs), strict=True):
                if not _nonzero(gradient):
                    continue
                if id(value) not in names or names[id(value)] == hidden_name(call):
                    return None
                found.add(names[id(value)])
        return frozenset(found) if calls else None

    def _part(self, tensor: Tensor, dim: int) -> Fraction | None:
        ranks = self.needs(tensor, dim)
        if ranks is None:
            return None
        required = RequiredIndices(dim=dim, size=tensor.shape[dim], ranks=ranks)
        if not required.is_split or len({len(each) for each in ranks}) > 1:
            return Fraction(1)
        return Fraction(len(ranks[0]), len(frozenset().union(*ranks)))

    @functools.cached_property
    def _masks(self) -> dict[int, list[Tensor | None]]:
        """By identity of every constrained tensor and module input: where each rank's gradient is not 0."""
        constraints = self.layer.size_constraints
        tensors = [each.out for each in constraints]
        tensors += [each.source[0] for each in constraints if each.source is not None]
        tensors += [value for call in self.layer.calls for value in call.named.values()]
        nodes = list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())
        masks: dict[int, list[Tensor | None]] = {id(node): [] for node in nodes}
        rows = {product.parameter for product in self.group}
        uses = [use for use in self.layer.uses if use.parameter in rows and use.x.requires_grad]
        if not nodes or not uses:
            return {}
        for rank in range(self.tp_size):
            total = torch.zeros(())
            for use in uses:
                start, stop = run_of(use.x.shape[-1], self.tp_size, rank)
                total = total + (use.x[..., start:stop].float() * _signs(use.x)[..., start:stop]).sum()
            for node, gradient in zip(nodes, gradients_of(total, nodes), strict=True):
                masks[id(node)].append(None if gradient is None else gradient != 0)
        return masks


def find_entries(facts: ModelFacts, reachability: Reachability) -> Iterator[dict[str, str]]:
    """Choices of the modules at which the region is entered, or its output summed, to their style.

    A module can be entered that leads nowhere but to the block's row products: the highest one costs least, the lowest
    has least in between that might not work on partial sums.
    """
    ladders = []
    owners = _entry_owners(reachability)
    for owner in sorted(owners | {product.module for product in reachability.bare}):
        ladder, module = [owner], parent_of(owner)
        while module and module != reachability.layer.fqn:
            bypassing = reachability.bypassing_inputs(module) if facts.modules[module].kind != "list" else None
            if bypassing is not None and (not bypassing or _can_bypass(facts, reachability, module, bypassing)):
                ladder.append(module)
            module = parent_of(module)
        ladders.append(ladder)
    seen: list[dict[str, str]] = []
    for step in (-1, 0, -2):
        chosen = {ladder[max(step, -len(ladder))] for ladder in ladders}
        entries = {name: _edge(reachability, name, owners) for name in chosen if not is_within(parent_of(name), chosen)}
        if entries not in seen:
            seen.append(entries)
            yield entries


def _edge(reachability: Reachability, entry: str, owners: set[str]) -> str:
    if not any(is_within(owner, (entry,)) for owner in owners):
        return "all_reduce"  # what it is given is split already
    return "region_output" if _holds_bare(reachability, entry) else "region"


def _holds_bare(reachability: Reachability, module: str) -> bool:
    return any(is_within(product.module, (module,)) for product in reachability.bare)


def _can_bypass(facts: ModelFacts, reachability: Reachability, module: str, names: frozenset[str]) -> bool:
    """Whether inputs of these names can bypass the module: where all of its output is summed, none can."""
    return not _holds_bare(reachability, module) and all(f"{module}.{name}" in facts.inputs() for name in names)


def _entry_owners(reachability: Reachability) -> set[str]:
    """Modules whose split weights multiply full features."""
    owners = set()
    for use in reachability.layer.uses:
        required = reachability.required_indices.get(use.parameter)
        if required is None or (required.dim == use.input_dim and reachability.parameters[use.parameter].ndim == 2):
            continue
        if not reachability.depends_on_split(use.x):
            owners.add(use.module)
    return owners


def find_sliced_inputs(facts: ModelFacts, reachability: Reachability, entries: Mapping[str, str]) -> dict[str, int]:
    """Inputs of modules of which every rank needs its own part (`module.argument` to the dim): heads, or features.

    A bias that the model computes for all heads once, such as ALiBi's, is one. It is split at or below the entries if
    it passes one, else where it comes first.
    """
    found: dict[str, int] = {}
    known = facts.inputs()
    calls = reachability.layer.calls
    inside = [call for call in calls if is_within(call.fqn, entries)]
    for call in (*inside, *(call for call in calls if call not in inside)):
        for name, value in call.named.items():
            full = f"{call.fqn}.{name}"
            seen = any(other.endswith(f".{name}") and _are_nested(call.fqn, parent_of(other)) for other in found)
            if seen or full not in known or reachability.depends_on_split(value):
                continue
            needs = reachability.input_needs(call, name)
            if needs is not None and _is_regular(facts, call.fqn, value.ndim, *needs):
                found[full] = needs[0]
    return found


def _are_nested(module: str, other: str) -> bool:
    return is_within(module, (other,)) or is_within(other, (module,))


def _is_regular(facts: ModelFacts, module: str, ndim: int, dim: int, ranks: Sequence[frozenset[int]]) -> bool:
    size = len(frozenset().union(*ranks))
    return _in_runs(size, ranks) if dim == ndim - 1 else _by_heads(facts, module, size, ranks)


def _in_runs(size: int, ranks: Sequence[frozenset[int]]) -> bool:
    return all(indices == frozenset(range(*run_of(size, len(ranks), rank))) for rank, indices in enumerate(ranks))


def _by_heads(facts: ModelFacts, module: str, size: int, ranks: Sequence[frozenset[int]]) -> bool:
    """Whether each rank needs its run of heads, in each of the blocks of all heads that make up the dim."""
    heads = facts.heads_around(module)
    if heads is None or size % heads.num_heads:
        return False
    for rank, indices in enumerate(ranks):
        start, stop = run_of(heads.num_heads, len(ranks), rank)
        if indices != {index for index in range(size) if start <= index % heads.num_heads < stop}:
            return False
    return True


def hidden_name(call: ModuleCall) -> str | None:
    """The name of a call's hidden states: that name, or its first floating-point input."""
    return "hidden_states" if "hidden_states" in call.named else next(iter(call.named), None)


def find_added(reachability: Reachability, entry: str) -> tuple[str, ...]:
    """Parameters that are added to the partial sum after the row products, so that each rank would add them.

    With the row products at zero, the output is linear in them and in nothing else: by Euler's theorem, the gradients
    times the values add up to the output.
    """
    total = _weighted_sum(_zeroed_outputs(reachability, entry))
    names = [
        name for name, value in reachability.parameters.items() if name.startswith(f"{entry}.") and value.requires_grad
    ]
    gradients = gradients_of(total, [reachability.parameters[name] for name in names])
    shares = {
        name: float((gradient * reachability.parameters[name].detach()).sum())
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None and _nonzero(gradient)
    }
    output = float(total.detach())
    for size in range(1, _MAX_ADDED + 1):
        for chosen in itertools.combinations(shares, size):
            if abs(sum(shares[name] for name in chosen) - output) <= 1e-4 * abs(output) + 1e-6:
                return chosen
    return ()


def find_bypassing_identities(model: nn.Module, reachability: Reachability, entry: str) -> tuple[str, ...]:
    """Identities inside that add full features to the partial sum (experts without weights)."""
    with_zeroed_outputs = reachability.layer.with_zeroed_outputs
    total = _weighted_sum(_zeroed_outputs(reachability, entry))
    found = []
    for call in with_zeroed_outputs.calls if with_zeroed_outputs is not None else ():
        inside = call.fqn.startswith(f"{entry}.") and isinstance(model.get_submodule(call.fqn), nn.Identity)
        if inside and call.inputs and any(_nonzero(gradient) for gradient in gradients_of(total, call.inputs)):
            found.append(call.fqn)
    return tuple(dict.fromkeys(found))


def _zeroed_outputs(reachability: Reachability, entry: str) -> list[Tensor]:
    """What `entry` puts out where the row products are zero."""
    calls = reachability.layer.with_zeroed_outputs.calls if reachability.layer.with_zeroed_outputs is not None else []
    return [value for call in calls if call.fqn == entry for value in call.outputs[:1]]


def _is_linear_weight(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(parent_of(name))
    weight = module._parameters.get("weight")
    return name.endswith(".weight") and (
        isinstance(module, nn.Linear) or (weight is not None and hasattr(module, "nf"))
    )


def gradients_of(total: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of a sum, None for an input that it does not depend on."""
    if not total.requires_grad:
        return [None] * len(inputs)
    return torch.autograd.grad(total, list(inputs), retain_graph=True, allow_unused=True)


def _nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool((gradient != 0).any())


def _weighted_sum(values: Sequence[Tensor]) -> Tensor:
    """The sum of all elements, each with a weight of its own: a number that depends on all that they depend on."""
    return sum(((value * _signs(value)).sum() for value in values), torch.zeros(()))


def _signs(value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(value.shape, generator=generator) + 0.5
