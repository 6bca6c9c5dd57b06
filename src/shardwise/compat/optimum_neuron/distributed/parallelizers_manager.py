"""`ParallelizersManager`: which models can be parallelized, and by what."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from transformers import CONFIG_MAPPING

from shardwise.compat.optimum_neuron.distributed.base import Parallelizer
from shardwise.compat.optimum_neuron.distributed.support import Support, find_support
from shardwise.errors import UnsupportedError, did_you_mean

__all__ = ["ParallelizersManager"]


class ParallelizersManager:
    """Finds the parallelizer of a model."""

    @classmethod
    def get_supported_model_types(cls) -> list[str]:
        """The model types that were seen to be split and to compute the same, by the table that `make coverage` makes;
        others may do so, too: see `is_model_supported`.
        """
        table = resources.files("shardwise.compat.optimum_neuron").joinpath("architectures.json")
        return list(json.loads(table.read_text())["model_types"])

    @classmethod
    def is_model_supported(cls, model_type_or_model: Any) -> Support:
        """Whether tensor parallelism, sequence parallelism on top of it, and pipeline parallelism can be used: three
        booleans, with a `reason` as text. They are the answers of the checks that run when a model is split.

        Args:
            model_type_or_model: a model type, a model class or a model, with PEFT's around it or in it.
        """
        return find_support(model_type_or_model)

    @classmethod
    def parallelizer_for_model(cls, model_type_or_model: Any) -> type[Parallelizer]:
        """The class that parallelizes the model: one for all.

        Raises:
            UnsupportedError: transformers has no such model type.
        """
        name = getattr(model_type_or_model, "model_type", model_type_or_model)  # of a config, too
        if not callable(name) and str(name) not in CONFIG_MAPPING:
            raise UnsupportedError(f"transformers has no model type {name!r}{did_you_mean(str(name), CONFIG_MAPPING)}")
        return Parallelizer
