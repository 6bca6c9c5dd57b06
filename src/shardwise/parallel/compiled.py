"""`torch.compile` of every layer, in place: names stay, and so does everything that hangs on a layer from outside.

# [Note: compiled whole]
A layer's forward compiles as one function with the edges of its split regions inside, or not at all: where torch would
end a graph there is an error. What hangs on the layer itself runs outside, as it is: FSDP2's hooks, the ends of a stack
that sequence parallelism splits, random streams. So all layers of one class share what was compiled for the first. What
regions would write down about the forward under way has been written before a layer is entered, because what is
recomputed may write nothing.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformers import Cache

from shardwise.errors import ConfigError, UnsupportedError, did_you_mean, one_line
from shardwise.parameters.registry import Registry
from shardwise.plan.options import Compile, check_choice
from shardwise.plan.structure import outermost_layers
from shardwise.runtime.context import SplitContext
from shardwise.runtime.linear import apply_mixin

__all__ = ["CompileCount", "apply_compilation", "check_compilation", "count_compilation"]

_OF_TORCH_COMPILE = ("guard_filter_fn", "use_aoti")
"""Options that `torch.compile` takes out of what the backend is given."""

_REFUSES_NOTES = Version(torch.__version__) < Version("2.13")
"""Whether torch takes for an effect what a recomputed region notes about its forward and takes back when it ends."""


@dataclass(frozen=True)
class CompileCount:
    """What torch.compile has done in this process; `str` says it in words.

    Attributes:
        graphs: pieces of code compiled, recompilations included.
        recompiles: how many of them were compiled before, for other inputs; of the last 64 pieces.
        graph_breaks: reasons why a graph ended, each with how often.
    """

    graphs: int
    recompiles: int
    graph_breaks: Counter[str]

    def __str__(self) -> str:
        breaks = sum(self.graph_breaks.values())
        reasons = "".join(f"; {count} x {reason}" for reason, count in self.graph_breaks.most_common(3))
        return f"{self.graphs} graph(s), {self.recompiles} recompiled, {breaks} graph break(s){reasons}"


class Compiled:
    """Mixin of a layer: runs what was compiled of its forward, unless it fills a cache of keys, as in `generate()`.

    Raises, when it runs:
        UnsupportedError: it is not one graph.
    """

    _compiled_forward: Callable[..., Any]
    _compiled_name: str
    _compiled_stack: str | None
    _compiled_context: SplitContext
    _compiled_settings: Callable[[], AbstractContextManager[None]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, UncapturedHigherOrderOpError, Unsupported, UserError

        # Where somebody looks at every operation torch compiles nothing; a cache of keys is another for every layer.
        if torch._C._len_torch_dispatch_stack() or any(isinstance(each, Cache) for each in (*args, *kwargs.values())):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        state = self._compiled_context.state
        state.enter_rows(state.stack_rows if self._compiled_stack is not None else 0)
        try:
            with self._compiled_settings():
                return self._compiled_forward(self, *args, **kwargs)
        except (Unsupported, UncapturedHigherOrderOpError, UserError) as error:
            raise _not_whole(self._compiled_name, error) from error
        except FailOnRecompileLimitHit as error:
            raise UnsupportedError(
                f"{self._compiled_name} would be compiled once more, for other inputs than before",
                why=str(error).splitlines()[0],
                fix="bring rows to few lengths, or leave lengths open with Compile(dynamic=True), or raise\n"
                "torch._dynamo.config.recompile_limit",
            ) from error


def apply_compilation(
    model: nn.Module, registry: Registry, choice: Compile | None, *, budget: float | None = None
) -> None:
    """Compiles the layers of `model` when they are first run. Communicates nothing.

    Raises:
        UnsupportedError: something drops under tp, or the device has no symmetric memory.
    """
    if choice is None:
        return
    context = registry.context
    if context.has_dropout and context.size > 1:
        raise UnsupportedError(
            "compilation of a model that drops under tp",
            why="ranks draw alike here and each for itself there, and a graph has one stream of random numbers",
            fix="set the dropouts of its config to 0, or leave out compilation, or use fsdp in place of tp",
        )
    context.is_compiled = True
    options = _options(choice, registry)
    known: dict[type, Callable[..., Any]] = {}
    for name in outermost_layers(registry.plan.stacks):
        layer = model.get_submodule(name)
        if type(layer) not in known:
            own = {**options, "options": copy.copy(options["options"])}  # torch takes out what is not the backend's
            known[type(layer)] = torch.compile(_own_code(type(layer).forward), fullgraph=True, **own)
        apply_mixin(
            layer,
            Compiled,
            _compiled_forward=known[type(layer)],
            _compiled_name=name,
            _compiled_stack=registry.plan.stack_of(name),
            _compiled_context=context,
            _compiled_settings=functools.partial(_settings, budget),
        )


def check_compilation(choice: Compile | None) -> None:
    """Raises `ConfigError` where torch has no such backend, or inductor no such option or an option of another type."""
    if choice is None:
        return
    name = choice.backend
    if isinstance(name, str):
        check_choice("Compile backend", name, tuple(torch.compiler.list_backends(exclude_tags=())))
    if name != "inductor" or not choice.options:
        return
    known = (*torch._inductor.list_options(), *_OF_TORCH_COMPILE)
    for option in choice.options:
        if option.replace("-", "_") not in known:  # as torch reads them
            raise ConfigError(
                f"Compile has the option {option!r}{did_you_mean(option, known)}",
                fix="use options of torch._inductor.config",
            )
    try:
        torch.compile(lambda: None, backend=name, options=dict(choice.options))
    except RuntimeError as error:
        raise ConfigError("Compile has an option of another type than inductor's", why=one_line(error)) from error


def count_compilation() -> CompileCount:
    """The counts of torch's own bookkeeping."""
    # slow to import, and not needed by anyone who does not compile
    from torch._dynamo.utils import counters, get_compilation_metrics

    breaks = Counter({str(reason).splitlines()[0]: count for reason, count in counters["graph_break"].items()})
    recompiles = sum(metrics.recompile_reason is not None for metrics in get_compilation_metrics())
    return CompileCount(graphs=counters["stats"]["unique_graphs"], recompiles=recompiles, graph_breaks=breaks)


def _options(choice: Compile, registry: Registry) -> dict[str, Any]:
    """What `torch.compile` is given."""
    found: dict[str, Any] = {"backend": choice.backend, "dynamic": choice.dynamic, "mode": choice.mode}
    found["options"] = dict(choice.options) if choice.options else None
    if not choice.async_tp:
        return found
    group = registry.context.group
    if group is None or registry.mesh.device.type != "cuda":
        raise UnsupportedError(
            f"async_tp over {registry.mesh}",
            why="products are computed while their parts travel through the symmetric memory of several GPUs along tp",
            fix="leave it out, or use a layout with tp on GPUs",
        )
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group.group_name)
    of_mode = torch._inductor.list_mode_options(choice.mode) if choice.mode is not None else {}
    return {**found, "mode": None, "options": {**of_mode, **(choice.options or {}), "_micro_pipeline_tp": True}}


@contextmanager
def _settings(budget: float | None) -> Iterator[None]:
    """Settings of torch itself while a layer runs, and so is compiled when it first does."""
    with ExitStack() as settings:
        if _REFUSES_NOTES:
            name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
            settings.enter_context(torch._dynamo.config.patch({name: True}))
        if budget is not None:
            settings.enter_context(torch._functorch.config.patch(activation_memory_budget=budget))
        yield


def _own_code(forward: Any) -> Any:
    """A copy of a function: torch counts what it compiles for each piece of code, which models may share."""
    if not isinstance(forward, types.FunctionType):
        return forward
    code, defaults, closure = forward.__code__.replace(), forward.__defaults__, forward.__closure__
    copied = types.FunctionType(code, forward.__globals__, forward.__name__, defaults, closure)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _not_whole(layer: str, error: Any) -> UnsupportedError:
    """The error for a layer that torch would compile in pieces."""
    stack = list(getattr(error, "real_stack", None) or ())
    lines = str(getattr(error, "msg", error)).strip().splitlines()
    explanation = next((line.split(":", 1)[1].strip() for line in lines if line.strip().startswith("Explanation:")), "")
    return UnsupportedError(
        f"{layer} is not one graph: {lines[0]}",
        at=f"{stack[-1].filename}, line {stack[-1].lineno}: {stack[-1].line}" if stack else None,
        why=explanation or None,
        fix="change the model there, or leave out compilation",
    )
