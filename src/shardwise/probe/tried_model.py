"""The tiny model on which a question about a model is tried."""

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from shardwise.data.batch import split_rows
from shardwise.errors import PlanError
from shardwise.parallel.facts import read_stacks
from shardwise.plan.structure import outermost_layers
from shardwise.probe.trial import Trial, Verdict, reraise_as
from shardwise.tiny.fields import read_field
from shardwise.tiny.models import build_tiny_model, make_batch, perturb_parameters, set_runnable_mode, shrink_config
from shardwise.tiny.random import set_dropout
from shardwise.tiny.shrink import apply_repeatable

Model = TypeVar("Model", bound=nn.Module)

ITEM = re.compile(r"(?<![^.])(expert_)?\d+(?![^.])")
"""The name of an item of a list, or of a dictionary of experts: "0", "expert_0"."""

_MAX_LAYERS = 6
"""Most layers with which a tiny model is tried to have layers of every kind."""

_SMALL_ENOUGH = 8_000_000
"""Elements up to which a model is its own tiny model, so that even parts given element by element fit it."""


def trial_of(tiny: PreTrainedModel, *, num_parts: int, drops: bool) -> Trial:
    """Trial with the result of `build_tried_model`.

    Raises:
        PlanError: the model does not run unsplit.
    """
    batch = make_batch(tiny, seed=0)
    set_runnable_mode(tiny, batch)
    padded = split_rows(make_batch(tiny, seed=0, padding="right"), 2, 2)[1]

    def explain(verdict: Verdict) -> PlanError:
        own = tiny.config.get_text_config()
        sizes = (f"{name} {read_field(own, name)}" for name in ("hidden_size", "num_attention_heads", "head_dim"))
        return PlanError(
            f"{type(tiny).__name__} does not run unsplit, so nothing shows how to split it",
            at=verdict.module or None,
            why=f"{verdict.reason}\n(tried with {', '.join(sizes)} and tokens [2, 16])",
            fix="correct the sizes in its config until it runs, or give rules of your own",
        )

    with reraise_as(explain):
        return Trial(tiny, batch, num_parts=num_parts, padded=padded, drops=drops)


def is_small(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) <= _SMALL_ENOUGH


def on_cpu(model: Model) -> Model:
    """Moves a model to the CPU. Fake tensors cannot be moved."""
    tensors = (*model.parameters(), *model.buffers())
    return model if any(isinstance(tensor, FakeTensor) for tensor in tensors) else model.cpu()


def build_tried_model(model: PreTrainedModel, **shrinking: Any) -> PreTrainedModel:
    """The model with other weights; for a large one, a tiny model made by `shrink_config` with these options."""
    own_size = is_small(model)
    if own_size and not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        tiny = on_cpu(copy.deepcopy(model)).float().eval().requires_grad_()  # whatever the caller trains, and where
        set_dropout(tiny, 0.0)
        apply_repeatable(tiny.config)
        perturb_parameters(tiny, torch.Generator().manual_seed(0))
        return tiny
    if own_size:
        return build_tiny_model(apply_repeatable(copy.deepcopy(model.config)), type(model), seed=0).eval()

    def build(num_layers: int) -> PreTrainedModel:
        config = shrink_config(model.config, without_dropout=True, **{"num_layers": num_layers, **shrinking})
        return build_tiny_model(config, type(model), seed=0).eval()

    return smallest_with_all_layer_kinds(build, model)


def smallest_with_all_layer_kinds(build: Callable[[int], Model], model: nn.Module) -> Model:
    """Result of `build` with the fewest layers that cover every kind in `model`; with two layers if no number does.

    Args:
        build: builds a model like `model` with the given number of layers, if they are all alike.
    """
    wanted, tried = _kinds(model), map(build, range(2, _MAX_LAYERS + 1))
    first = next(tried)
    return next((few for few in itertools.chain((first,), tried) if wanted <= _kinds(few)), first)


def _kinds(model: nn.Module) -> set[tuple[str, frozenset[str]]]:
    return {layer_kind(layer, names_in(model, layer)) for layer in outermost_layers(read_stacks(model))}


def layer_kind(layer: str, names: frozenset[str]) -> tuple[str, frozenset[str]]:
    """Kind of a layer: its stack, and the names inside it, whatever the length of lists."""
    return layer.rpartition(".")[0], frozenset(ITEM.sub(r"\1*", name) for name in names)


def names_in(model: nn.Module, layer: str) -> frozenset[str]:
    """Names of a layer's parameters and of the modules that own them, relative to the layer."""
    module = model.get_submodule(layer)
    own = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return frozenset(f".{name}" for each in own for name in (each, each.rpartition(".")[0]) if name)
