"""torch's `MixedPrecisionPolicy` as ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from shardwise.errors import ConfigError, UnsupportedError
from shardwise.plan.options import Precision

__all__ = ["cast_output", "own_dtype", "precision_of"]


def precision_of(
    policy: MixedPrecisionPolicy, model: nn.Module, *, params: torch.dtype | None, nonfinite: str
) -> Precision | None:
    """What the policy says, for the dtype that the model's parameters have, or are to have (`params`); None where it
    changes nothing.

    Raises:
        ConfigError: it is no policy.
        UnsupportedError: it asks for inputs not to be cast.
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ConfigError(
            f"mp_policy cannot be a {type(policy).__name__}", fix="use torch.distributed.fsdp.MixedPrecisionPolicy(...)"
        )
    if not policy.cast_forward_inputs:
        raise UnsupportedError(
            "MixedPrecisionPolicy(cast_forward_inputs=False)",
            why="inputs of every unit are cast to the dtype that it computes in",
            fix="cast inside the modules that compute in another dtype",
        )
    own = params or own_dtype(model)
    compute, reduce = policy.param_dtype or own, policy.reduce_dtype or policy.param_dtype or own
    if nonfinite == "ignore" and compute == own == reduce:
        return None
    return Precision(params=_name(own), compute=_name(compute), reduce=_name(reduce), nonfinite=nonfinite)


def own_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's first floating-point parameter."""
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


def cast_output(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Has floating-point outputs of the model be of `dtype`; nothing where None."""
    if dtype is None:
        return

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    model.register_forward_hook(lambda module, args, output: tree_map(cast, output))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
