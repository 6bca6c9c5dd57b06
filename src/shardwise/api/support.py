"""Whether a model can be split at all, and by what: the checks that run when it is, on a model without values."""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from shardwise.api.prepare import decide
from shardwise.errors import ShardwiseError, UnsupportedError, one_line
from shardwise.parallel.build import build_meta_model, named_class
from shardwise.parameters.registry import is_split
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapters import find_model
from shardwise.topology.shape import MeshShape

__all__ = ["Support", "find_support"]

_KINDS = {
    "tp2": ("tp2", ParallelSpec()),
    "tp2 along the sequence": ("tp2", ParallelSpec(sequence_parallel=True)),
    "pp2": ("pp2", ParallelSpec()),
}


_CLASSES: tuple[Any, ...] = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForImageTextToText,
    transformers.AutoModelForSpeechSeq2Seq,
    transformers.AutoModelForCTC,
    transformers.AutoModelForImageClassification,
    transformers.AutoModelForAudioClassification,
    transformers.AutoModel,
)
"""Which class represents a model type."""


class _Answers(NamedTuple):
    tensor: bool
    sequence: bool
    pipeline: bool


class Support(_Answers):
    """Whether a model can be split over tp, along the sequence on top of that, and over pp. True where it can be over
    tp.

    Attributes:
        reason: why not, as text; empty where all can be used.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        return self.tensor


def find_support(given: str | type | nn.Module) -> Support:
    """What a model can be split by, over two ranks. Communicates nothing.

    Seconds for an architecture that was not examined before; what is found is kept on disk.

    Args:
        given: a model, real or not, split or not; a model class; or a model type, which represents the class that
            its config names, its causal language model, or else the first of a list of other tasks.
    """
    try:
        model = _unsplit_model(given)
        refused = {kind: _why_not(model, *each) for kind, each in _KINDS.items()}
    except ShardwiseError as error:
        refused = dict.fromkeys(_KINDS, _said(error))
    tensor, sequence, pipeline = (not why for why in refused.values())
    support = Support(tensor, tensor and sequence, pipeline)
    support.reason = "\n".join(f"{kind}: {why}" for kind, why in refused.items() if why)
    return support


def _why_not(model: nn.Module, layout: str, spec: ParallelSpec) -> str:
    try:
        decide(model, MeshShape.parse(layout), spec)
    except ShardwiseError as error:
        return _said(error)
    return ""


def _unsplit_model(given: Any) -> nn.Module:
    if isinstance(given, nn.Module):
        model = find_model(given)
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(f"a {type(model).__name__} is no model of transformers")
        return build_meta_model(model.config, type(model), dtype=model.dtype, options={}) if is_split(model) else model
    is_class = isinstance(given, type) and issubclass(given, PreTrainedModel)
    if not isinstance(given, str) and not is_class:
        raise UnsupportedError(f"{given!r} is no model, model class or model type of transformers")
    try:
        config = AutoConfig.for_model(given) if isinstance(given, str) else given.config_class()
    except Exception as error:  # a config's class refuses its own defaults with errors of many kinds
        why = one_line(error, limit=300)
        raise UnsupportedError(f"there is no default config of {given!r}: {why}") from error
    return build_meta_model(config, given if is_class else _first_class(config), dtype=None, options={})


def _first_class(config: PreTrainedConfig) -> Any:
    """The first auto class that has models of such a config; None where none has, or the config names a class."""
    if named_class(config) is not None:
        return None
    return next((each for each in _CLASSES if type(config) in each._model_mapping), None)


def _said(error: ShardwiseError) -> str:
    return " ".join(f"{error.summary}; {error.why}".split() if error.why else error.summary.split())
