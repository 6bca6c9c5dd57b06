"""`ParallelizersManager`: which models can be parallelized."""

import json
from importlib import resources
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from shardwise.api.prepare import decide
from shardwise.compat.optimum_neuron.distributed.base import Parallelizer
from shardwise.errors import ShardwiseError, UnsupportedError, as_error, did_you_mean
from shardwise.parallel.build import build_meta_model, named_class
from shardwise.parameters.registry import is_split
from shardwise.plan.options import ParallelSpec
from shardwise.runtime.adapter_facts import find_model
from shardwise.topology.shape import MeshShape

__all__ = ["ParallelizersManager", "Support"]

_KINDS = {
    "tp2": (MeshShape(tp_size=2), ParallelSpec()),
    "tp2 along the sequence": (MeshShape(tp_size=2), ParallelSpec(sequence_parallel=True)),
    "pp2": (MeshShape(pp_size=2), ParallelSpec()),
}
_CLASSES: tuple[Any, ...] = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModel,
)
"""Which class represents a model type: the first that has one."""


class Support(tuple[bool, bool, bool]):
    """Three booleans; its truth value is the first of them.

    Attributes:
        reason: why something is not supported; "" if all are true.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        return self[0]


class ParallelizersManager:
    """Finds the parallelizer of a model."""

    @classmethod
    def get_supported_model_types(cls) -> list[str]:
        """Returns the model types that are proved to compute the same when split, from the table of `make coverage`."""
        table = resources.files("shardwise.compat.optimum_neuron").joinpath("architectures.json")
        return list(json.loads(table.read_text())["model_types"])

    @classmethod
    def is_model_supported(cls, model_type_or_model: Any) -> Support:
        """Returns whether tensor parallelism, sequence parallelism with it, and pipeline parallelism are supported.

        Runs the checks that also run when a model is split.

        Args:
            model_type_or_model: a model, with PEFT adapters or not; a model class; or a model type, which stands for
                the class that its config names, else for the first class in a list of tasks.
        """
        refused = {}
        for kind, (shape, spec) in _KINDS.items():
            try:
                decide(_unsplit_model(model_type_or_model), shape, spec)
            except ShardwiseError as error:
                text = f"{error.summary}; {error.why}" if error.why else error.summary
                refused[kind] = " ".join(text.split())
        tensor, sequence, pipeline = (kind not in refused for kind in _KINDS)
        support = Support((tensor, tensor and sequence, pipeline))
        support.reason = "\n".join(f"{kind}: {why}" for kind, why in refused.items())
        return support

    @classmethod
    def parallelizer_for_model(cls, model_type_or_model: Any) -> type[Parallelizer]:
        """Returns the parallelizer class of the model: one class for all.

        Raises:
            UnsupportedError: transformers has no such model type.
        """
        name = getattr(model_type_or_model, "model_type", model_type_or_model)  # of a config, too
        if not callable(name) and str(name) not in CONFIG_MAPPING:
            raise UnsupportedError(f"transformers has no model type {name!r}{did_you_mean(str(name), CONFIG_MAPPING)}")
        return Parallelizer


def _unsplit_model(given: Any) -> nn.Module:
    if isinstance(given, nn.Module):
        model = find_model(given)
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(f"a {type(model).__name__} is no model of transformers")
        return build_meta_model(model.config, type(model), dtype=model.dtype, options={}) if is_split(model) else model
    with as_error(UnsupportedError, f"there is no default config of {given!r}", limit=300):
        config = AutoConfig.for_model(given) if isinstance(given, str) else given.config_class()
    chosen = None if isinstance(given, str) else given
    if chosen is None and named_class(config) is None:
        chosen = next((each for each in _CLASSES if type(config) in each._model_mapping), None)
    return build_meta_model(config, chosen, dtype=None, options={})
