"""Watches a tiny model run: which parameters multiply what, in which module, layer by layer.

Every layer starts from detached inputs, so it has its own autograd graph, which shows what depends on what.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.parallel.facts import read_facts
from shardwise.plan.decision import NormFormula
from shardwise.plan.structure import is_within, outermost_layers, parent_of, upwards
from shardwise.probe.layer_order import as_hook
from shardwise.runtime.arguments import argument_names
from shardwise.runtime.norm import compute_norm, moments_of, norm_formula
from shardwise.search.traced_sizes import MADE, SizeConstraint, flat, size_constraints_of, traced_integers
from shardwise.tiny.inputs import clone_batch

# Functions that contract the last dim of an activation with a parameter: (position of the activation, of the weight).
_PRODUCTS = {
    **dict.fromkeys((F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm), (0, 1)),
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), (1, 2)),
    Tensor.__rmatmul__: (1, 0),
}


@dataclass(eq=False)
class Use:
    """One product of an activation with a parameter."""

    parameter: str
    module: str  # that runs
    x: Tensor  # the activation, in the layer's graph
    out: Tensor
    input_dim: int  # the contracted dim of the parameter


@dataclass(eq=False)
class ModuleCall:
    """One call of a module inside a layer: its inputs as graph nodes, and by argument names."""

    fqn: str
    inputs: list[Tensor] = field(default_factory=list)
    named: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # all arguments by name, including integer ones
    carried: frozenset[str] = frozenset()  # names of arguments that an earlier layer returned
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Layer:
    """Record of one layer's run."""

    fqn: str
    outputs: list[Tensor] = field(default_factory=list)  # returned tensors that are used later
    uses: list[Use] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # by their names in the layer; tied ones in each
    size_constraints: list[SizeConstraint] = field(default_factory=list)  # if watched thoroughly
    with_zeroed_outputs: "Layer | None" = None  # the same layer with its row products at zero, if needed


def watch(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    cut: frozenset[str] = frozenset(),
    thorough: bool = False,
    with_zeroed_outputs: bool = False,
) -> list[Layer]:
    """Runs the model once; returns its layers in the order in which they first ran.

    Args:
        cut: parameters whose products are detached, so that later tensors do not depend on earlier ones.
        thorough: also record sizes, and make graph nodes of inputs and new tensors that need no gradient.
        with_zeroed_outputs: set the detached products to zero.
    """
    watcher = _Watcher(model, cut, thorough=thorough, with_zeroed_outputs=with_zeroed_outputs)
    with watcher.hooked(), traced_integers(model, tuple(watcher.layers)) if thorough else nullcontext(), watcher:
        model(**clone_batch(batch))
    watcher.forget_unused()
    return [layer for layer in watcher.ran.values() if layer.outputs]


class _Watcher(TorchFunctionMode):
    def __init__(self, model: nn.Module, cut: frozenset[str], *, thorough: bool, with_zeroed_outputs: bool) -> None:
        super().__init__()
        self.model, self.cut, self.thorough, self.with_zeroed_outputs = model, cut, thorough, with_zeroed_outputs
        self.layers = {name: Layer(name) for name in outermost_layers(read_facts(model).stacks)}
        self.ran: dict[str, Layer] = {}
        self.running: Layer | None = None
        self.stack: list[ModuleCall] = []
        self.names: dict[int, list[str]] = {}
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}
        self.returned: dict[int, Tensor] = {}
        self.consumed: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
            layer = next((self.layers[around] for around in upwards(name) if around in self.layers), None)
            if layer is not None and parameter.is_floating_point():
                layer.parameters[name] = parameter

    def forget_unused(self) -> None:
        """Drops layer outputs that no layer of the stack uses, such as attention maps. Hidden states come first."""
        used: dict[str, set[int]] = {}
        for layer in self.layers.values():
            positions = {at for at, out in enumerate(layer.outputs) if id(out) in self.consumed}
            used.setdefault(parent_of(layer.fqn), {0}).update(positions)
        for layer in self.layers.values():
            layer.outputs = [out for at, out in enumerate(layer.outputs) if at in used[parent_of(layer.fqn)]]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name != "__get__":
            given = [id(value) for value in flat((*args, *kwargs.values()))]
            self.consumed.update(key for key in given if key in self.returned)
        if self.thorough and self.running is not None:
            out = self._sized(self.running, func, args, kwargs, out)
        if name == "__getitem__" and isinstance(out, Tensor) and id(self._origin(args[0])) in self.names:
            self.selected[id(out)] = out, args[0]  # an expert's weight, picked by a tensor
        if self.running is None:
            return out
        values = [*args, *(kwargs[each] for each in ("input", "weight", "mat1", "mat2") if each in kwargs)]
        positions = _PRODUCTS.get(func, (len(values),))
        if len(values) <= max(positions) or not isinstance(out, Tensor):
            return out
        x, weight = (values[position] for position in positions)
        parameter = self._name(weight)
        if parameter is None or self._name(x) is not None:
            return out
        if parameter in self.cut:
            out = out.detach().requires_grad_() * (0.0 if self.with_zeroed_outputs else 1.0)
        module = self.stack[-1].fqn if self.stack else ""
        input_dim = self._input_dim(weight, weight.ndim - (1 if func is F.linear else 2))
        self.running.uses.append(Use(parameter, module, x, out, input_dim))
        return out

    def _name(self, value: Any) -> str | None:
        """Returns the name of the parameter that `value` is or views; for a tied one, its name in the running layer."""
        names = self.names.get(id(self._origin(value))) if isinstance(value, Tensor) else None
        if names is None:
            return None
        own = (name for name in names if self.running is not None and is_within(name, (self.running.fqn,)))
        return next(own, names[0])

    def _origin(self, value: Tensor) -> Tensor:
        """Returns the tensor of which `value` is a view or selection; `value` itself if it is none."""
        while id(value) not in self.names:
            if value._base is not None:
                value = value._base
            elif id(value) in self.selected:
                value = self.selected[id(value)][1]
            else:
                break
        return value

    def _sized(self, layer: Layer, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Records the sizes given to the operation. Makes new tensors graph nodes, so that influence reaches them."""
        if isinstance(out, Tensor) and out.is_leaf and out.is_floating_point() and func.__name__ in MADE:
            out = out.requires_grad_() * 1.0
        layer.size_constraints += size_constraints_of(func, args, kwargs, out)
        return out

    def _input_dim(self, weight: Tensor, dim: int) -> int:
        """The dim of the parameter that a product contracts along `dim` of its view `weight`, found by the strides."""
        base = self._origin(weight)
        stride, size = weight.stride(dim), weight.shape[dim]
        for candidate in reversed(range(base.ndim)):
            if base.stride(candidate) == stride and base.shape[candidate] % size == 0:
                return candidate
        return base.ndim - 1

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context manager: layers start detached, and module calls are recorded."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if is_within(name, self.layers):
                    enter, leave = as_hook(self._enter, name), as_hook(self._leave, name)
                    stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(leave))
                if (formula := norm_formula(module)) is not None:
                    compute = as_hook(_compute_elementwise, formula)
                    stack.enter_context(module.register_forward_hook(compute, with_kwargs=True))
            yield

    def _enter(self, fqn: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        names = argument_names(module)
        tensors = _tensors(names, args, kwargs)
        carried = frozenset(name for name, value in tensors.items() if id(value) in self.returned)
        call = ModuleCall(fqn, tensors=tensors, carried=carried)
        self.stack.append(call)
        if fqn in self.layers:
            self.running = self.ran[fqn] = self.layers[fqn]
        if self.running is not None:
            self.running.calls.append(call)
        changed = tuple(self._node(value, call) for value in args)
        changed_kwargs = {name: self._node(value, call) for name, value in kwargs.items()}
        given = _tensors(names, changed, changed_kwargs)
        call.named = {name: value for name, value in given.items() if value.requires_grad}
        return changed, changed_kwargs

    def _node(self, value: Any, call: ModuleCall) -> Any:
        """Returns an argument of a call as its own graph node, detached if the call is a layer's."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or self._name(value) is not None:
            return value
        if call.fqn in self.layers if value.requires_grad else self.thorough:
            value = value.detach().requires_grad_()
        if not value.requires_grad:
            return value
        call.inputs.append(value * 1.0)
        return call.inputs[-1]

    def _leave(self, fqn: str, module: nn.Module, args: Any, output: Any) -> None:
        call = self.stack.pop()
        call.outputs = [value for value in flat(output) if isinstance(value, Tensor) and value.requires_grad]
        if fqn in self.layers:
            layer, self.running = self.layers[fqn], None
            layer.outputs = call.outputs
            self.returned |= {id(value): value for value in call.outputs}


def _tensors(names: Sequence[str], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Returns the tensors among a call's arguments, by name."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _compute_elementwise(formula: NormFormula, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    """A norm's output with constant statistics, which ranks share: each feature depends on one input feature alone."""
    values = [*args, *kwargs.values()]
    gate = values[1] if len(values) > 1 else None

    def constants(values: Tensor, *, centered: bool) -> tuple[Tensor | None, Tensor]:
        return moments_of(values.detach(), centered=centered)

    return compute_norm(formula, module, values[0], gate=gate, moments=constants).contiguous()
