"""Watches a tiny model compute: which parameters multiply what, in which module, layer by layer.

Every layer starts from detached inputs, so its autograd graph is its own; the graph then tells what depends on what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import UnsupportedError
from shardwise.parallel.facts import read_facts
from shardwise.plan.structure import is_within, outermost_layers, parent_of
from shardwise.runtime.arguments import argument_names
from shardwise.runtime.norm import compute_norm, recognise_norm
from shardwise.search.traced_sizes import MADE, SizeConstraint, size_constraints_of, traced_integers
from shardwise.tiny.objective import copied

__all__ = ["Layer", "ModuleCall", "Use", "watch"]

# Functions that contract the last dim of an activation with a parameter: (position of the activation, of the weight).
_PRODUCTS = {
    F.linear: (0, 1),
    torch.matmul: (0, 1),
    Tensor.matmul: (0, 1),
    Tensor.__matmul__: (0, 1),
    Tensor.__rmatmul__: (1, 0),
    torch.mm: (0, 1),
    torch.bmm: (0, 1),
    torch.addmm: (1, 2),
    torch.baddbmm: (1, 2),
    Tensor.baddbmm: (1, 2),
    Tensor.addmm: (1, 2),
}


@dataclass(eq=False)
class Use:
    """One product of an activation with a parameter.

    Attributes:
        parameter: FQN of the parameter.
        module: FQN of the module that was running.
        x: the activation, in the layer's graph.
        out: the product.
        input_dim: the dim of the parameter that is contracted.
    """

    parameter: str
    module: str
    x: Tensor
    out: Tensor
    input_dim: int


@dataclass(eq=False)
class ModuleCall:
    """One call of a module inside a layer: its inputs as nodes of the graph, and by its forward's argument names.

    Attributes:
        tensors: all of its tensors by name, as they were given, integers included.
        carried: names of those that an earlier layer returned.
    """

    fqn: str
    inputs: list[Tensor] = field(default_factory=list)
    named: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Layer:
    """One layer as it ran.

    Attributes:
        fqn: its name.
        outputs: what it returned, and something later used.
        uses: its products with parameters.
        calls: the modules that ran.
        parameters: all inside the layer, by their names there; tied ones appear in each of their layers.
        size_constraints: the sizes that operations were given by integer attributes, if watched thoroughly.
        with_zeroed_outputs: the same layer with its row products at zero, where that is needed.
    """

    fqn: str
    outputs: list[Tensor] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    size_constraints: list[SizeConstraint] = field(default_factory=list)
    with_zeroed_outputs: Layer | None = None


def watch(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    cut: frozenset[str] = frozenset(),
    thorough: bool = False,
    with_zeroed_outputs: bool = False,
) -> list[Layer]:
    """Runs the model once and returns what its layers did, in the order in which they first ran.

    Args:
        cut: parameters whose products are detached: what comes after them no longer depends on what went in.
        thorough: whether to record sizes too, and to make nodes of inputs and new tensors that need no gradient.
        with_zeroed_outputs: whether the detached products are zero.
    """
    watcher = _Watcher(model, cut, thorough=thorough, with_zeroed_outputs=with_zeroed_outputs)
    with ExitStack() as stack:
        stack.enter_context(watcher.hooked())
        if thorough:
            stack.enter_context(traced_integers(model, tuple(watcher.layers)))
        stack.enter_context(watcher)
        model(**copied(batch))
    watcher.forget_unused()
    return [layer for layer in map(watcher.layers.__getitem__, watcher.ran) if layer.outputs]


class _Watcher(TorchFunctionMode):
    def __init__(self, model: nn.Module, cut: frozenset[str], *, thorough: bool, with_zeroed_outputs: bool) -> None:
        super().__init__()
        self.cut = cut
        self.thorough = thorough
        self.with_zeroed_outputs = with_zeroed_outputs
        self.layers = {name: Layer(name) for name in outermost_layers(read_facts(model).stacks)}
        self.ran: dict[str, None] = {}
        self.running: Layer | None = None
        self.stack: list[str] = []
        self.model = model
        self.names: dict[int, list[str]] = {}
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}
        self.returned: dict[int, Tensor] = {}
        self.consumed: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
            layer = next((layer for layer in self.layers.values() if name.startswith(f"{layer.fqn}.")), None)
            if layer is not None and parameter.is_floating_point():
                layer.parameters[name] = parameter

    def forget_unused(self) -> None:
        """Drops what layers returned and nothing used in any layer of their stack, such as attention maps.

        The hidden states come first and are kept.
        """
        used: dict[str, set[int]] = {}
        for layer in self.layers.values():
            positions = {at for at, out in enumerate(layer.outputs) if id(out) in self.consumed}
            used.setdefault(parent_of(layer.fqn), {0}).update(positions)
        for layer in self.layers.values():
            layer.outputs = [out for at, out in enumerate(layer.outputs) if at in used[parent_of(layer.fqn)]]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.returned and getattr(func, "__name__", "") != "__get__":
            self.consumed.update(id(value) for value in _flat([args, kwargs]) if id(value) in self.returned)
        if self.thorough and self.running is not None:
            out = self._sized(func, args, kwargs, out)
        picks = getattr(func, "__name__", "") == "__getitem__" and isinstance(out, Tensor)
        if picks and id(self._origin(args[0])) in self.names:
            self.selected[id(out)] = out, args[0]  # an expert's weight, picked by a tensor
        positions = _PRODUCTS.get(func)
        if positions is None or self.running is None or not isinstance(out, Tensor):
            return out
        values = list(args) + [kwargs[name] for name in ("input", "weight", "mat1", "mat2") if name in kwargs]
        if len(values) <= max(positions):
            return out
        x, weight = values[positions[0]], values[positions[1]]
        name = self._name(weight)
        if name is None or self._name(x) is not None:
            return out
        if name in self.cut:
            out = out.detach().requires_grad_() * (0.0 if self.with_zeroed_outputs else 1.0)
        transposed = func is not F.linear
        input_dim = self._input_dim(weight, transposed=transposed)
        module = self.stack[-1] if self.stack else ""
        self.running.uses.append(Use(name, module, x, out, input_dim))
        return out

    def _name(self, value: Any) -> str | None:
        """The parameter that `value` is, or is a view of; of tied ones' names the one in the running layer."""
        if not isinstance(value, Tensor):
            return None
        names = self.names.get(id(self._origin(value)))
        if names is None:
            return None
        layer = f"{self.running.fqn}." if self.running is not None else ""
        return next((name for name in names if name.startswith(layer)), names[0])

    def _origin(self, value: Tensor) -> Tensor:
        """The tensor that `value` is a view or a selection of, `value` itself if of none."""
        while id(value) not in self.names:
            if value._base is not None:
                value = value._base
            elif id(value) in self.selected:
                value = self.selected[id(value)][1]
            else:
                break
        return value

    def _sized(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Records what sizes the operation was given; new tensors become nodes, so that influence reaches them."""
        assert self.running is not None
        if isinstance(out, Tensor) and out.is_leaf and out.is_floating_point() and func.__name__ in MADE:
            out = out.requires_grad_() * 1.0
        self.running.size_constraints += size_constraints_of(func, args, kwargs, out)
        return out

    def _input_dim(self, weight: Tensor, *, transposed: bool) -> int:
        """Which dim of the parameter the product contracts, found by the strides where the weight is a view."""
        base = self._origin(weight)
        dim = weight.ndim - 2 if transposed else weight.ndim - 1
        stride, size = weight.stride(dim), weight.shape[dim]
        for candidate in reversed(range(base.ndim)):
            if base.stride(candidate) == stride and base.shape[candidate] % size == 0:
                return candidate
        return base.ndim - 1

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, layers start detached and module calls are recorded."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if is_within(name, self.layers):
                    enter = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                    leave = module.register_forward_hook(self._leaving(name), with_kwargs=True)
                    stack.callback(enter.remove)
                    stack.callback(leave.remove)
                elementwise = self._elementwise_norm(module)
                if elementwise is not None:
                    stack.callback(module.register_forward_hook(elementwise, with_kwargs=True).remove)
            yield

    def _elementwise_norm(self, module: nn.Module) -> Any:
        """A hook that makes a norm's statistics constants, so that its output depends on its input feature by feature.

        A norm over split features shares its statistics between ranks; only what is elementwise decides its split.
        """
        try:
            formula = recognise_norm(module)
        except UnsupportedError:
            return None  # it computes something else: then the graph is taken as it is

        def hook(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            values = [*args, *kwargs.values()]
            gate = values[1] if len(values) > 1 else None
            return compute_norm(
                formula, module, values[0], gate=gate, means=lambda moments: moments.detach().mean(-2, keepdim=True)
            )

        return hook

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            call = ModuleCall(name)
            is_layer = name in self.layers

            def node(value: Any) -> Any:
                if not isinstance(value, Tensor) or not value.is_floating_point() or self._name(value) is not None:
                    return value
                if (is_layer and value.requires_grad) or (self.thorough and not value.requires_grad):
                    value = value.detach().requires_grad_()
                if not value.requires_grad:
                    return value
                value = value * 1.0
                call.inputs.append(value)
                return value

            if is_layer:
                self.running = self.layers[name]
                self.ran.setdefault(name)
            self.stack.append(name)
            names = argument_names(module)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            call.tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
            call.carried = frozenset(key for key, value in call.tensors.items() if id(value) in self.returned)
            changed = tuple(map(node, args)), {key: node(value) for key, value in kwargs.items()}
            named = {**dict(zip(names, changed[0], strict=False)), **changed[1]}
            call.named = {
                key: value for key, value in named.items() if isinstance(value, Tensor) and value.requires_grad
            }
            if self.running is not None:
                self.running.calls.append(call)
            return changed

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.stack.pop()
            tensors = [value for value in _flat(output) if isinstance(value, Tensor) and value.requires_grad]
            if self.running is not None:
                call = next((call for call in reversed(self.running.calls) if call.fqn == name), None)
                if call is not None:
                    call.outputs = tensors
            if name in self.layers:
                self.layers[name].outputs = tensors
                self.returned |= {id(value): value for value in tensors}
                self.running = None

        return leave


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value
