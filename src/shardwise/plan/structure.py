"""What planning needs to know about a model, as plain values: its modules and parameters, their shapes, heads, layers.

Read off a real or meta model by `shardwise.parallel.facts`; nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

__all__ = [
    "Adapted",
    "AdapterFacts",
    "AdapterParameter",
    "Heads",
    "LayerStack",
    "ModelFacts",
    "ModuleFacts",
    "fqn_of",
    "is_within",
    "nearest",
    "outermost",
    "outermost_layers",
    "parent_of",
    "upwards",
]

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of one attention module.

    Attributes:
        num_heads: query heads.
        num_key_value_heads: key/value heads; equal to `num_heads` in multi-head attention.
        head_dim: features of a query head where the module says so, else None.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One module: what it is, and the shapes of the parameters that it owns itself.

    Attributes:
        kind: "linear" (weight `[out, in]`), "transposed" (weight `[in, out]`), "embedding", "list" (a `ModuleList`
            whose items run in a row), "dict" (a `ModuleDict`), or "other".
        parameters: own parameter name to shape, children excluded.
        heads: present on attention modules.
        attributes: integer attributes that the module's forward reads, `config.NAME` for those of its config.
        inputs: names of the arguments that its forward takes, except names of children and parameters.
    """

    kind: str
    parameters: Mapping[str, Shape] = field(default_factory=dict)
    heads: Heads | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """Layers: the items of a `ModuleList` that hold matrices, where none of its items is a single operation or a list.

    Lists of linears, embeddings, convolutions or norms hold no layers. A list inside of a layer is a stack too: blocks
    of a stage, experts, or the attentions and the MLP that a layer consists of.

    Attributes:
        fqn: the `ModuleList`.
        items: FQNs of the layers, as registered; in which order they run, `search/trace.py` finds out.
        within: FQN of the layer of another stack that this one is inside of; empty where it is outermost.
    """

    fqn: str
    items: tuple[str, ...]
    within: str = ""


@dataclass(frozen=True, kw_only=True)
class AdapterParameter:
    """One parameter of an adapter.

    Attributes:
        in_dim, out_dim: which of its dims runs along the input or the output features of the weight that it adapts;
            None where none does.
    """

    fqn: str
    shape: Shape
    in_dim: int | None = None
    out_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A weight of the base with the adapters around it.

    Attributes:
        module: FQN of the module that computes with both; the base's module has this name where there are no adapters.
        in_dim, out_dim: its dims of input and of output features.
        full_reader: what kind of adapter it is, where that reads the full weight; empty otherwise.
    """

    module: str
    weight: str
    in_dim: int
    out_dim: int
    own: tuple[AdapterParameter, ...]
    full_reader: str = ""


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """What adapters put around and into a model.

    Attributes:
        adapted: every weight that has adapters.
        instances: FQN of every module of the base that has another name in the model, to that name; to several names
            where copies of it are trained.
        bases: FQN of every parameter that is no adapter's, to its name in the base.
        tied: as in `ModelFacts`, by the model's own names.
    """

    adapted: tuple[Adapted, ...]
    instances: Mapping[str, tuple[str, ...]]
    bases: Mapping[str, str]
    tied: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """An unsplit model; one with adapters by the names that it would have without.

    Attributes:
        model_type: transformers' `config.model_type`.
        modules: FQN to facts in the model's own order; `""` is the model.
        stacks: of layers, as registered; one inside of a layer comes after the one that it belongs to.
        tied: alias parameter FQN to the FQN under which the parameter comes first.
        head: FQN of the output embedding (`lm_head`), None where the model has none.
        embedding: FQN of the input embedding, None where the model has none.
        embedding_gives_logits: whether logits are made of the embedding's weight, in no module's forward.
        adapters: what adapters change; None where there are none.
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
        """FQN of every layer of every stack, to that of the outermost layer that it is or is inside of."""
        found: dict[str, str] = {}
        for stack in self.stacks:
            found |= {layer: found.get(stack.within, layer) for layer in stack.items}
        return found

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """FQNs of the modules right inside of each module that has some."""
        found: dict[str, list[str]] = {}
        for name in self.modules:
            if name:
                found.setdefault(parent_of(name), []).append(name)
        return found

    def layer_of(self, fqn: str) -> str | None:
        """The outermost layer that a module or parameter is or is inside of; None where it is in no layer."""
        return next((self.layers[name] for name in upwards(fqn) if name in self.layers), None)

    def parameters(self) -> Iterator[tuple[str, str, str, Shape]]:
        """Every parameter as (FQN, module FQN, own name, canonical shape), tied aliases included."""
        for module, facts in self.modules.items():
            for name, shape in facts.parameters.items():
                yield fqn_of(module, name), module, name, shape

    def attributes(self) -> dict[str, int]:
        """FQN of every integer attribute that a module's forward reads, to its value."""
        return {
            f"{module}.{name}": value
            for module, facts in self.modules.items()
            if module
            for name, value in facts.attributes.items()
        }

    def inputs(self) -> dict[str, str]:
        """FQN of every input of a module (`MODULE.ARGUMENT`), to the module's."""
        return {f"{module}.{name}": module for module, facts in self.modules.items() if module for name in facts.inputs}

    def heads_around(self, module: str) -> Heads | None:
        """The heads of the nearest module at or above `module` that has any."""
        return next((found for name in upwards(module) if (found := self.modules[name].heads) is not None), None)

    def inside(self, ancestor: str) -> Iterator[str]:
        """The FQNs of the modules below `ancestor`, itself excluded."""
        prefix = f"{ancestor}." if ancestor else ""
        return (name for name in self.modules if name.startswith(prefix) and name != ancestor and name)


def outermost_layers(stacks: Iterable[LayerStack]) -> tuple[str, ...]:
    """FQNs of the layers that are inside of no other: what is gathered, recomputed and compiled together."""
    return tuple(layer for stack in stacks if not stack.within for layer in stack.items)


def upwards(fqn: str) -> Iterator[str]:
    """`fqn` and the names of all modules around it but the model itself."""
    while fqn:
        yield fqn
        fqn = parent_of(fqn)


def parent_of(fqn: str) -> str:
    """`a.b` for `a.b.c`, the empty name for a top-level one."""
    return fqn.rpartition(".")[0]


def fqn_of(module: str, name: str) -> str:
    """`a.b` for what the module `a` calls `b`; the model itself has the empty name. `torch.compile`'s wrapper has the
    name of the module inside.
    """
    joined = f"{module}.{name}" if module else name
    return ".".join(part for part in joined.split(".") if part != "_orig_mod") if "_orig_mod" in joined else joined


def nearest(fqn: str, modules: Container[str]) -> str | None:
    """The nearest of these modules that `fqn` names or is inside of; None where there is none."""
    return next((name for name in upwards(fqn) if name in modules), None)


def outermost(fqns: Iterable[str]) -> list[str]:
    """Those that are inside of no other one, in their order."""
    known = dict.fromkeys(fqns)
    return [fqn for fqn in known if nearest(parent_of(fqn), known) is None]


def is_within(fqn: str, modules: Iterable[str]) -> bool:
    """Whether `fqn` names one of these modules, or something inside of one."""
    return f"{fqn}.".startswith(tuple(f"{module}." for module in modules))
