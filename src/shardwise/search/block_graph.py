"""One block of a layer in the layer's graph: its entry, a rank's inputs and sizes, and additions to its partial sum."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from torch import Tensor, nn

from shardwise.plan.structure import ModelFacts, is_within, outermost, parent_of, upwards
from shardwise.runtime.arguments import hidden_name
from shardwise.search.influence import (
    RequiredIndices,
    RowProduct,
    depends,
    features_of,
    gradients_of,
    is_linear_weight,
    is_nonzero,
    weighted_sum,
    weighted_sums,
)
from shardwise.search.trace import Layer, ModuleCall
from shardwise.search.traced_sizes import Equation

_MAX_ADDED = 2


class BlockGraph:
    """How the outputs of a block depend on the parts of its parameters that ranks hold.

    Attributes:
        layer: the traced layer, in which outputs of row products are detached.
        required_indices: what each rank must hold of the parameters that the block splits beside its row products.
        bare: row products whose weights belong to no linear; their sum is the output of the module around them.
    """

    def __init__(
        self,
        model: nn.Module,
        facts: ModelFacts,
        layer: Layer,
        group: Sequence[RowProduct],
        products: Sequence[RowProduct],
        *,
        num_parts: int,
    ) -> None:
        self.model, self.facts, self.layer, self.group, self.num_parts = model, facts, layer, group, num_parts
        rows = {product.parameter for product in products}
        needed = _united(group).items()
        self.required_indices = {name: each for name, each in needed if each.is_split and name not in rows}
        self.bare = [each for each in group if not is_linear_weight(model, each.parameter)]
        self._others = [product.module for product in products if product not in group]
        self._inputs = facts.inputs()
        self.bypassing_inputs = functools.cache(self._find_bypassing_inputs)

    def equations(self) -> Iterator[Equation]:
        """Yields every size that traced integers gave, with a rank's part of it; None if no split feature matters."""
        for constraint in self.layer.size_constraints:
            yield Equation(constraint.size, self._part(constraint.out, constraint.dim))

    def _find_bypassing_inputs(self, module: str) -> frozenset[str] | None:
        """Inputs of `module` that reach the layer's outputs past the (detached) row products: they bypass a region.

        None if the hidden states do, or if the module holds other blocks' row products: then it is no region.
        """
        if any(is_within(other, (module,)) for other in self._others):
            return None
        # Where the region is left at the output of all, products may be weighted before: zeroed, they add nothing.
        layer = (self.layer.with_zeroed_outputs if self.bare else None) or self.layer
        calls = [call for call in layer.calls if call.fqn == module]
        total = weighted_sum([value for value in layer.outputs if value.grad_fn is not None])
        found: set[str] = set()
        for call in calls:
            names = {id(value): name for name, value in call.named.items()}
            gradients = zip(call.inputs, gradients_of(total, call.inputs), strict=True)
            reaching = {names.get(id(value), "") for value, gradient in gradients if is_nonzero(gradient)}
            if not call.inputs or reaching & {"", hidden_name(call.named)}:
                return None
            found |= reaching
        return frozenset(found) if calls else None

    @functools.cached_property
    def entries(self) -> list[dict[str, str]]:
        """Returns the alternatives for the edges of the region, the first to be tried first. Each maps the FQNs
        of the modules at which the region is entered, or at which its output is summed, to their style.

        A module can be entered if it leads only to the block's row-split products. The outermost such module needs
        the fewest collectives. The innermost has the fewest modules inside that might not work on partial sums.
        """
        owners = self._entry_owners()
        ladders = []
        for owner in sorted(owners | {product.module for product in self.bare}):
            around = itertools.takewhile(lambda module: module != self.layer.fqn, upwards(parent_of(owner)))
            ladders.append([owner, *filter(self._can_be_entered, around)])
        found: list[dict[str, str]] = []
        for step in (-1, 0, -2):
            chosen = {ladder[max(step, -len(ladder))] for ladder in ladders}
            entries = {name: self._edge(name, owners) for name in outermost(chosen)}
            if entries not in found:
                found.append(entries)
        return found

    def sliced_inputs(self, entries: Mapping[str, str]) -> dict[str, int]:
        """Returns the inputs of modules of which every rank needs its own part, heads or features: `module.argument` to
        the dim.

        An example is a bias that the model computes once for all heads, such as ALiBi's. It is split at or below the
        entries if it passes one, else where it first occurs.
        """
        found: dict[str, int] = {}
        for call in sorted(self.layer.calls, key=lambda call: not is_within(call.fqn, entries)):
            for name, value in call.named.items():
                full = f"{call.fqn}.{name}"
                same = [parent_of(other) for other in found if other.endswith(f".{name}")]
                is_seen = is_within(call.fqn, same) or any(is_within(module, (call.fqn,)) for module in same)
                if is_seen or full not in self._inputs or self._depends_on_split(value):
                    continue
                required = self._input_needs(value)
                if required is not None and self._is_regular(call, value.ndim, required):
                    found[full] = required.dim
        return found

    def added(self, entry: str) -> tuple[str, ...]:
        """Returns the parameters that are added to the partial sum after the row products, so that every rank would add
        them.

        With the row products at zero, the output is linear in them and in nothing else: by Euler's theorem, the
        gradients times the values add up to the output.
        """
        total = weighted_sum(self._zeroed_outputs(entry))
        inside = {
            name: value
            for name, value in self.layer.parameters.items()
            if is_within(name, (entry,)) and value.requires_grad
        }
        shares = {
            name: float((gradient * value.detach()).sum())
            for (name, value), gradient in zip(inside.items(), gradients_of(total, [*inside.values()]), strict=True)
            if gradient is not None and is_nonzero(gradient)
        }
        output = float(total.detach())
        for size in range(1, _MAX_ADDED + 1):
            for chosen in itertools.combinations(shares, size):
                if abs(sum(shares[name] for name in chosen) - output) <= 1e-4 * abs(output) + 1e-6:
                    return chosen
        return ()

    def bypassing_identities(self, entry: str) -> tuple[str, ...]:
        """Returns the identity modules inside that add full features to the partial sum (experts without weights)."""
        outputs, zeroed = self._zeroed_outputs(entry), self.layer.with_zeroed_outputs
        calls = (call for call in (zeroed.calls if zeroed else ()) if is_within(parent_of(call.fqn), (entry,)))
        identities = (call for call in calls if isinstance(self.model.get_submodule(call.fqn), nn.Identity))
        return tuple(dict.fromkeys(call.fqn for call in identities if depends(outputs, call.inputs)))

    def _zeroed_outputs(self, entry: str) -> list[Tensor]:
        """Returns the outputs of `entry` with the row products at zero."""
        zeroed = self.layer.with_zeroed_outputs
        return [value for call in (zeroed.calls if zeroed else ()) if call.fqn == entry for value in call.outputs[:1]]

    def _entry_owners(self) -> set[str]:
        """Returns the modules whose split weights multiply full features."""
        owners = set()
        for use in self.layer.uses:
            required = self.required_indices.get(use.parameter)
            is_row = required and required.dim == use.input_dim and self.layer.parameters[use.parameter].ndim == 2
            if required is not None and not is_row and not self._depends_on_split(use.x):
                owners.add(use.module)
        return owners

    def _can_be_entered(self, module: str) -> bool:
        """Returns whether a region can begin at a module. Inputs may bypass it unless its whole output is summed."""
        bypassing = self.bypassing_inputs(module) if self.facts.modules[module].kind != "list" else None
        if not bypassing:
            return bypassing is not None
        return not self._holds_bare(module) and all(f"{module}.{name}" in self._inputs for name in bypassing)

    def _edge(self, entry: str, owners: set[str]) -> str:
        if not any(is_within(owner, (entry,)) for owner in owners):
            return "all_reduce"  # what it is given is split already
        return "region_output" if self._holds_bare(entry) else "region"

    def _holds_bare(self, module: str) -> bool:
        return any(is_within(product.module, (module,)) for product in self.bare)

    def _depends_on_split(self, value: Tensor) -> bool:
        """Returns whether `value` is computed from parameters that the block splits."""
        split = [self.layer.parameters[name] for name in self.required_indices]
        return depends([value], [parameter for parameter in split if parameter.requires_grad])

    def _is_regular(self, call: ModuleCall, ndim: int, required: RequiredIndices) -> bool:
        """Whether each rank needs one run of features, or one run of heads in each block of all heads along the dim."""
        size, heads = len(required.needed), self.facts.heads_around(call.fqn)
        period = size if required.dim == ndim - 1 else heads.num_heads if heads is not None else size + 1
        runs = (features_of(rank, period, self.num_parts) for rank in range(self.num_parts))
        expected = [{index for index in range(size) if run.start <= index % period < run.stop} for run in runs]
        return size % period == 0 and list(required.ranks) == expected

    def _input_needs(self, value: Tensor) -> RequiredIndices | None:
        """Returns what each rank needs of an input, along the first dim where ranks differ; None if there is none."""
        found = (self._needs(value, dim) for dim in range(value.ndim))
        return next((required for required in found if required is not None and required.is_split), None)

    def _part(self, tensor: Tensor, dim: int) -> Fraction | None:
        """Returns the part of a dim that a rank depends on; None if a rank depends on nothing."""
        required = self._needs(tensor, dim)
        if required is None:
            return None
        if not required.is_split or len(set(map(len, required.ranks))) > 1:
            return Fraction(1)
        return Fraction(len(required.ranks[0]), len(required.needed))

    def _needs(self, tensor: Tensor, dim: int) -> RequiredIndices | None:
        """Returns the indices that each rank depends on; None if a rank depends on none."""
        masks = self._masks.get(id(tensor), [])
        required = RequiredIndices.along(dim % tensor.ndim, masks) if len(masks) == self.num_parts else None
        return required if required is not None and all(required.ranks) else None

    @functools.cached_property
    def _masks(self) -> dict[int, list[Tensor]]:
        """Id of every constrained tensor and module input, to the mask of each rank's nonzero gradient."""
        tensors = [each.out for each in self.layer.size_constraints]
        tensors += [value for call in self.layer.calls for value in call.named.values()]
        nodes = list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())
        rows = {product.parameter for product in self.group}
        inputs = [use.x for use in self.layer.uses if use.parameter in rows and use.x.requires_grad]
        gradients = zip(*(gradients_of(total, nodes) for total in weighted_sums(inputs, self.num_parts)), strict=True)
        return {
            id(node): [gradient != 0 for gradient in each if gradient is not None]
            for node, each in zip(nodes, gradients, strict=True)
        }


def _united(products: Sequence[RowProduct]) -> dict[str, RequiredIndices]:
    """Returns what each rank must hold for all row products together."""
    found: dict[str, RequiredIndices] = {}
    for product in products:
        for name, required in product.required_indices.items():
            known = found.setdefault(name, required)
            if known.dim == required.dim:
                found[name] = known.united(required)
    return found
