"""Losses that are made of token scores, such as TRL's, on models in stages."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parameters.registry import registry_of
from shardwise.pipeline.runner import runner_of
from shardwise.runtime.forward_state import generator_of


def _leaves(output: Any) -> tuple[Tensor | None, ...]:
    """Returns what has a gradient."""
    return output.log_probs, output.entropy, output.aux_loss


def _gradient_of(value: Tensor | None) -> Tensor | None:
    return torch.zeros_like(value) if value is not None and value.grad is None else getattr(value, "grad", None)


class StagedScores:
    """A model in stages with a fused head, as TRL's losses call it.

    A loss of TRL is made of log-probabilities outside of the model, and stages cannot wait for it (see [Note: a forward
    through a pipeline]). So a call scores the rows without gradients. `backward` finds the loss's gradients with
    respect to the scores, and runs the stages again, forward and backward, with these gradients.

    A batch is not divided where the model has dropout, so that both runs drop the same elements, or balances experts,
    which is no sum over rows.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[tuple[dict[str, Any], Tensor, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **kwargs: Any) -> Any:
        """Calls the model. Scores of a fused call with gradients are leaves of a graph.

        Communicates: what a forward of the model does.
        """
        if not (kwargs.get("fused_lm_head") and torch.is_grad_enabled()):
            return self._model(**kwargs)
        state = self._generator.get_state()
        with torch.no_grad():
            output = self._model(**kwargs)
        for value in _leaves(output):
            if value is not None:
                value.requires_grad_()
        output.loss = None  # a loss is made of the scores
        self._calls.append((kwargs, state, output))
        return output

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`, which is made of the outputs of the calls since the last `backward`.

        Communicates: what a training forward of the model does, for each call.
        """
        calls, self._calls = self._calls, []
        loss.backward()
        runner = runner_of(self._model)
        assert runner is not None
        around, asked = self._generator.get_state(), runner.num_microbatches
        try:
            for kwargs, state, output in calls:
                gradients = tuple(map(_gradient_of, _leaves(output)))
                is_whole = registry_of(self._model).context.has_dropout or output.aux_loss is not None
                runner.num_microbatches = 1 if is_whole else asked
                self._generator.set_state(state)
                sums = {"num_items_in_batch": 1, "score_gradients": gradients}  # the loss is a sum over rows
                self._model(**{**kwargs, **sums}).loss.backward()
        finally:
            self._generator.set_state(around)
            runner.num_microbatches = asked

    @property
    def _generator(self) -> torch.Generator:
        return generator_of(registry_of(self._model).mesh.device)
