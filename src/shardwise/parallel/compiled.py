"""`torch.compile` of every layer, in place. Names and hooks of the layers stay.

# [Note: compiled whole]
A layer's forward, with the edges of its split regions, compiles as one graph. A graph break is an error. Hooks on the
layer itself run outside of the graph: FSDP2's hooks, the ends of a stack with sequence parallelism, random streams. So
all layers of one class share one compiled function. State of the forward that regions would write is written before a
layer is entered, because recomputed code must not write.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformers import Cache

from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import Registry
from shardwise.plan.options import Compile, check_choice
from shardwise.plan.structure import outermost_layers
from shardwise.runtime.context import SplitContext
from shardwise.runtime.linear import apply_mixin

# Whether torch takes for an effect what a recomputed region notes about its forward and takes back when it ends.
_REFUSES_NOTES = Version(torch.__version__) < Version("2.13")


class Compiled:
    """Mixin of a layer that runs its compiled forward, unless the call fills a cache of keys, as in `generate()`."""

    _compiled_forward: Callable[..., Any]
    _compiled_stack: str | None
    _compiled_context: SplitContext
    _compiled_settings: Callable[[], AbstractContextManager[None]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer's forward, compiled."""
        # Where somebody looks at every operation torch compiles nothing; a cache of keys is another for every layer.
        if torch._C._len_torch_dispatch_stack() or any(isinstance(each, Cache) for each in (*args, *kwargs.values())):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        state = self._compiled_context.state
        state.enter_rows(state.stack_rows if self._compiled_stack is not None else 0)
        with self._compiled_settings():
            return self._compiled_forward(self, *args, **kwargs)


def apply_compilation(
    model: nn.Module, registry: Registry, choice: Compile | None, *, budget: float | None = None
) -> None:
    """Makes the layers of `model` compile at their first run; see `check_compilation`. Communicates nothing."""
    if choice is None:
        return
    known: dict[type, Callable[..., Any]] = {}
    for name in outermost_layers(registry.plan.stacks):
        layer = model.get_submodule(name)
        if type(layer) not in known:
            known[type(layer)] = torch.compile(
                _own_code(type(layer).forward),
                fullgraph=True,
                backend=choice.backend,
                dynamic=choice.dynamic,
                mode=choice.mode,
                options=dict(choice.options or {}) or None,  # torch takes out what is not the backend's
            )
        apply_mixin(
            layer,
            Compiled,
            _compiled_forward=known[type(layer)],
            _compiled_stack=registry.plan.stack_of(name),
            _compiled_context=registry.context,
            _compiled_settings=functools.partial(_settings, budget),
        )


def check_compilation(choice: Compile | None, context: SplitContext | None = None) -> None:
    """Checks that layers can be compiled. `context` is that of the model to be split, if there is one yet."""
    if choice is None:
        return
    if isinstance(choice.backend, str):
        check_choice("Compile backend", choice.backend, tuple(torch.compiler.list_backends(exclude_tags=())))
    if context is not None and context.has_dropout and context.tp.size > 1:
        raise UnsupportedError(
            "compilation of a model with dropout under tp",
            why="ranks draw alike here and each for itself there, and a graph has one stream of random numbers",
            fix="set the dropouts of its config to 0, or leave out compilation, or use fsdp in place of tp",
        )


@contextmanager
def _settings(budget: float | None) -> Iterator[None]:
    """Context manager: torch's settings while a layer runs and, the first time, compiles."""
    with ExitStack() as settings:
        if _REFUSES_NOTES:
            name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
            settings.enter_context(torch._dynamo.config.patch({name: True}))
        if budget is not None:
            settings.enter_context(torch._functorch.config.patch(activation_memory_budget=budget))
        yield


def _own_code(forward: Any) -> Any:
    """Returns a copy of a function. torch counts compilations per code object, which models may share."""
    if not isinstance(forward, types.FunctionType):
        return forward
    code, defaults, closure = forward.__code__.replace(), forward.__defaults__, forward.__closure__
    copied = types.FunctionType(code, forward.__globals__, forward.__name__, defaults, closure)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied
