"""Norms over features that are split over tp ranks: the statistics are shared, everything else is local."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import copy_to_region, reduce_from_region
from shardwise.errors import UnsupportedError
from shardwise.layers.context import SplitContext

__all__ = ["SplitNorm", "epsilon_of", "recognise_norm"]

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")


class SplitNorm:
    """Mixin of an RMS or layer norm whose features are split over tp ranks.

    Features that several ranks hold (replicated key/value heads) count once for each holder, in the sums and in the number
    of features alike, so the statistics stay exact.

    Communicates: over tp, one all-reduce of one value a token (two for a layer norm) forward, the same backward.
    """

    _split: SplitContext
    _num_features: int
    _centered: bool
    _weight_offset: float

    def forward(self, x: Tensor) -> Tensor:
        """Args: x `[..., features]`, per rank `[..., features / tp]`. Returns the same shape."""
        values = x.float()
        moments = [values.pow(2).sum(-1, keepdim=True)]
        if self._centered:
            moments.append(values.sum(-1, keepdim=True))
        means = self._shared(torch.cat(moments, -1)) / self._num_features
        if self._centered:
            center = means[..., 1:]
            values = (values - center) * torch.rsqrt(means[..., :1] - center.pow(2) + epsilon_of(self))
        else:
            values = values * torch.rsqrt(means + epsilon_of(self))
        bias = getattr(self, "bias", None)
        values = values * (self.weight.float() + self._weight_offset)  # type: ignore[attr-defined]
        return (values if bias is None else values + bias.float()).to(x.dtype)

    def _shared(self, moments: Tensor) -> Tensor:
        group = self._split.group
        return copy_to_region(reduce_from_region(moments, group), group)


def recognise_norm(module: nn.Module) -> tuple[bool, float]:
    """Which formula the norm computes, by trying it: (subtracts the mean, offset added to the weight).

    Raises:
        UnsupportedError: it is no RMS norm or layer norm over its last dim.
    """
    probe = copy.deepcopy(module).to_empty(device="cpu").float()
    probe._forward_hooks.clear()
    probe._forward_pre_hooks.clear()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
        x = torch.randn(3, probe.get_parameter("weight").shape[-1], generator=generator) + 0.5
        expected = probe(x)
    bias = getattr(probe, "bias", None)
    for centered in (False, True):
        for offset in (0.0, 1.0):
            values = x - x.mean(-1, keepdim=True) if centered else x
            values = (
                values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon_of(probe)) * (probe.get_parameter("weight") + offset)
            )
            if torch.allclose(values if bias is None else values + bias, expected, atol=1e-4, rtol=1e-4):
                return centered, offset
    raise UnsupportedError(
        f"{type(module).__name__} cannot be split over its features",
        why="it computes neither an RMS norm nor a layer norm over its last dim",
        fix="keep it whole: gather its input with colwise_gather_output and split again with rowwise_split_input",
    )


def epsilon_of(module: object) -> float:
    """What the norm adds to the mean square."""
    for name in _EPSILON_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return 0.0
