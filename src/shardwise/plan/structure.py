"""Facts about a model as plain values: its modules and parameters, their shapes, heads, layers.

`shardwise.parallel.facts` reads them off a real or meta model. This module does not import torch.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads of one attention module.

    Attributes:
        num_key_value_heads: number of key/value heads; equal to `num_heads` in multi-head attention.
        head_dim: features of a query head if the module says so, else None.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One module: its kind, and the shapes of its own parameters.

    Attributes:
        kind: "linear" (weight `[out, in]`), "transposed" (weight `[in, out]`), "embedding", "list" (a `ModuleList`
            whose items run one after another), "dict" (a `ModuleDict`), or "other".
        parameters: own parameter name to shape, without children.
        attributes: integer attributes that the module's forward reads; `config.NAME` for those of its config.
        inputs: names of the arguments of its forward, except names of children and parameters.
    """

    kind: str
    parameters: Mapping[str, Shape] = field(default_factory=dict)
    heads: Heads | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """Layers: the items of a `ModuleList` that hold matrices, if none of the items is a single operation or a list.

    Lists of linears, embeddings, convolutions or norms hold no layers. A list inside of a layer is a stack too: blocks
    of a stage, experts, or the attentions and the MLP that a layer consists of.

    Attributes:
        items: FQNs of the layers, as registered; `search/trace.py` finds the order in which they run.
        within: FQN of the layer of another stack that contains this one; "" if it is outermost.
    """

    fqn: str
    items: tuple[str, ...]
    within: str = ""


@dataclass(frozen=True, kw_only=True)
class AdapterParameter:
    """One parameter of an adapter.

    Attributes:
        in_dim, out_dim: dims that run along the input or output features of the adapted weight; None if none does.
    """

    fqn: str
    shape: Shape
    in_dim: int | None = None
    out_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A weight of the base with the adapters around it.

    Attributes:
        module: FQN of the module that computes with both. Without adapters, the base's module has this name.
        in_dim, out_dim: the weight's dims of input and output features.
        full_reader: kind of the adapter if it reads the full weight; else "".
    """

    module: str
    weight: str
    in_dim: int
    out_dim: int
    own: tuple[AdapterParameter, ...]
    full_reader: str = ""


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """Adapters of a model.

    Attributes:
        instances: FQN of every base module that has another name in the model, to that name; to several names if
            trained copies exist.
        bases: FQN of every parameter outside of adapters, to its name in the base.
    """

    adapted: tuple[Adapted, ...]
    instances: Mapping[str, tuple[str, ...]]
    bases: Mapping[str, str]
    tied: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """An unsplit model. A model with adapters has the names that it would have without.

    Attributes:
        modules: FQN to facts in the model's order; `""` is the model.
        stacks: stacks of layers, as registered; a stack inside of a layer comes after the stack of that layer.
        tied: alias FQN of a tied parameter to its first FQN.
        head: FQN of the output embedding (`lm_head`); None if there is none.
        embedding: FQN of the input embedding; None if there is none.
        embedding_gives_logits: whether logits are computed from the embedding's weight outside of any module's forward.
    """

    model_type: str
    modules: Mapping[str, ModuleFacts]
    stacks: tuple[LayerStack, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    head: str | None = None
    embedding: str | None = None
    embedding_gives_logits: bool = False
    adapters: AdapterFacts | None = None

    @cached_property
    def layers(self) -> dict[str, str]:
        """Maps the FQN of every layer of every stack to the FQN of its outermost layer."""
        found: dict[str, str] = {}
        for stack in self.stacks:
            found |= {layer: found.get(stack.within, layer) for layer in stack.items}
        return found

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """Maps the FQN of every module with children to the children's FQNs."""
        found: dict[str, list[str]] = {}
        for name in self.modules:
            if name:
                found.setdefault(parent_of(name), []).append(name)
        return found

    def layer_of(self, fqn: str) -> str | None:
        """Returns the outermost layer that contains a module or parameter; None if there is none."""
        return next((self.layers[name] for name in upwards(fqn) if name in self.layers), None)

    def parameters(self) -> Iterator[tuple[str, str, str, Shape]]:
        """Yields every parameter as (FQN, module FQN, own name, canonical shape), including tied aliases."""
        for module, facts in self.modules.items():
            for name, shape in facts.parameters.items():
                yield fqn_of(module, name), module, name, shape

    def attributes(self) -> dict[str, int]:
        """Maps the FQN of every integer attribute that a module's forward reads to its value."""
        return {
            f"{module}.{name}": value
            for module, facts in self.modules.items()
            if module
            for name, value in facts.attributes.items()
        }

    def inputs(self) -> dict[str, str]:
        """Maps the FQN of every input of a module (`MODULE.ARGUMENT`) to the module's FQN."""
        return {f"{module}.{name}": module for module, facts in self.modules.items() if module for name in facts.inputs}

    def heads_around(self, module: str) -> Heads | None:
        """Returns the heads of the nearest module at or above `module` that has any."""
        return next((found for name in upwards(module) if (found := self.modules[name].heads) is not None), None)

    def inside(self, ancestor: str) -> Iterator[str]:
        """Yields the FQNs of the modules below `ancestor`, without itself."""
        prefix = f"{ancestor}." if ancestor else ""
        return (name for name in self.modules if name.startswith(prefix) and name != ancestor and name)


def outermost_layers(stacks: Iterable[LayerStack]) -> tuple[str, ...]:
    """Returns the FQNs of layers that are inside of no other: the units of gathering, recomputation and compilation."""
    return tuple(layer for stack in stacks if not stack.within for layer in stack.items)


def upwards(fqn: str) -> Iterator[str]:
    """Yields `fqn` and the FQNs of its enclosing modules, except the model itself."""
    while fqn:
        yield fqn
        fqn = parent_of(fqn)


def parent_of(fqn: str) -> str:
    """Returns the FQN of the enclosing module: `a.b` for `a.b.c`, "" for a top-level name."""
    return fqn.rpartition(".")[0]


def fqn_of(module: str, name: str) -> str:
    """Returns the FQN of a child: `a.b` for the child `b` of module `a`; "" is the model. `torch.compile`'s wrapper has
    its inner module's name.
    """
    joined = f"{module}.{name}" if module else name
    return ".".join(part for part in joined.split(".") if part != "_orig_mod") if "_orig_mod" in joined else joined


def nearest(fqn: str, modules: Container[str]) -> str | None:
    """Returns the nearest of these modules that is `fqn` or contains it; None if there is none."""
    return next((name for name in upwards(fqn) if name in modules), None)


def outermost(fqns: Iterable[str]) -> list[str]:
    """Returns the names that are inside of no other of the names, in their order."""
    known = dict.fromkeys(fqns)
    return [fqn for fqn in known if nearest(parent_of(fqn), known) is None]


def is_within(fqn: str, modules: Iterable[str]) -> bool:
    """Returns whether `fqn` is one of these modules, or inside of one."""
    return f"{fqn}.".startswith(tuple(f"{module}." for module in modules))
