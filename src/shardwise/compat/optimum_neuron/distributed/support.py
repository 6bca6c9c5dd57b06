"""Whether a model can be split: the checks of a split, run on a model without values."""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from shardwise.api.prepare import decide
from shardwise.errors import ShardwiseError, UnsupportedError, one_line
from shardwise.parallel.build import build_meta_model, named_class
from shardwise.parameters.registry import is_split
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapters import find_model
from shardwise.topology.shape import MeshShape

__all__ = ["Support", "find_support"]

_KINDS = {
    "tp2": (MeshShape(tp_size=2), ParallelSpec()),
    "tp2 along the sequence": (MeshShape(tp_size=2), ParallelSpec(sequence_parallel=True)),
    "pp2": (MeshShape(pp_size=2), ParallelSpec()),
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
"""Which class represents a model type: the first that has one."""


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

    Args:
        given: a model, split or not; a model class; or a model type, which represents the class that its config names,
            its causal language model, or else the first of a list of other tasks.
    """
    refused = {}
    for kind, (shape, spec) in _KINDS.items():
        try:
            decide(_unsplit_model(given), shape, spec)
        except ShardwiseError as error:
            text = f"{error.summary}; {error.why}" if error.why else error.summary
            refused[kind] = " ".join(text.split())
    tensor, sequence, pipeline = (kind not in refused for kind in _KINDS)
    support = Support(tensor, tensor and sequence, pipeline)
    support.reason = "\n".join(f"{kind}: {why}" for kind, why in refused.items())
    return support


def _unsplit_model(given: Any) -> nn.Module:
    if isinstance(given, nn.Module):
        model = find_model(given)
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(f"a {type(model).__name__} is no model of transformers")
        return build_meta_model(model.config, type(model), dtype=model.dtype, options={}) if is_split(model) else model
    try:
        config = AutoConfig.for_model(given) if isinstance(given, str) else given.config_class()
    except Exception as error:  # a config's class refuses its own defaults with errors of many kinds
        why = one_line(error, limit=300)
        raise UnsupportedError(f"there is no default config of {given!r}: {why}") from error
    chosen = None if isinstance(given, str) else given
    if chosen is None and named_class(config) is None:
        chosen = next((each for each in _CLASSES if type(config) in each._model_mapping), None)
    return build_meta_model(config, chosen, dtype=None, options={})
