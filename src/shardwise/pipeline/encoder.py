"""Direct calls of a pipelined model's encoder, as in `generate()`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from shardwise.runtime.linear import apply_mixin
from shardwise.stages.model import Stages

__all__ = ["apply_pipelined_encoder"]


def apply_pipelined_encoder(model: nn.Module, stages: Stages) -> None:
    """Makes a direct call of `model`'s encoder, if it has one, run the stages. Communicates nothing."""
    if stages.encoder:
        apply_mixin(model.get_submodule(stages.encoder), PipelinedEncoder)


class PipelinedEncoder:
    """Mixin: a direct call runs the whole pipeline, with a decoder input of one token, and returns the encoder's
    output.

    Later forwards with that output skip the encoder's layers.
    """

    _stages: Stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Like the encoder's own call; every rank of the pipeline must make it.

        Returns:
            The last hidden states, on every rank.

        Communicates: what a forward of the model does.
        """
        if self._stages.current is not None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        model, own = self._stages.model, inspect.signature(self.forward).parameters  # type: ignore[attr-defined]
        given = {**dict(zip(own, args, strict=False)), **kwargs}
        taken = inspect.signature(model.forward).parameters
        given = {name: value for name, value in given.items() if name in taken and name != "return_dict"}
        inputs: Tensor = next(value for value in given.values() if isinstance(value, Tensor))
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        first = torch.full((inputs.shape[0], 1), start, device=inputs.device)
        output = model(**given, decoder_input_ids=first, use_cache=False)
        return BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
