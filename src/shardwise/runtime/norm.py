"""Norms over features that are split over tp ranks. Ranks share the statistics and compute the rest locally."""

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.collectives import copy_to_region, gather_to_region, reduce_from_region
from shardwise.errors import UnsupportedError
from shardwise.plan.decision import NormFormula
from shardwise.runtime.context import Axis

Moments = Callable[..., tuple[Tensor | None, Tensor]]  # called as `moments_of`

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")


def compute_norm(
    formula: NormFormula, module: Any, x: Tensor, *, gate: Tensor | None, moments: Moments | None = None
) -> Tensor:
    """Returns the norm of `x` by `formula`, with the module's weight, bias and epsilon.

    Args:
        x: `[..., features]`, any floating dtype.
        gate: the same shape and dtype, or None.
        moments: computes the statistics; default: from the features of `x` alone.

    Returns:
        Tensor with the shape and dtype of `x`. Statistics are computed in float32.
    """
    values = x.float()
    if gate is not None and formula.gate == "before":
        values = values * F.silu(gate.float())
    mean, square = (moments or moments_of)(values, centered=formula.centered)
    values = (values if mean is None else values - mean) * torch.rsqrt(square + epsilon_of(module))
    values = values * (module.weight.float() + formula.offset)
    bias = getattr(module, "bias", None)
    values = values if bias is None else values + bias.float()
    if gate is not None and formula.gate == "after":
        values = values * F.silu(gate.float())
    return values.to(x.dtype)


def moments_of(values: Tensor, *, centered: bool) -> tuple[Tensor | None, Tensor]:
    """Returns mean (None unless `centered`) and mean squared deviation `[..., 1]` of `values` `[..., features]`."""
    if not centered:
        return None, values.pow(2).mean(-1, keepdim=True)
    variance, mean = torch.var_mean(values, -1, correction=0, keepdim=True)
    return mean, variance


class SplitNorm:
    """Mixin of an RMS norm or layer norm whose features are split over tp ranks.

    Features that several ranks hold (replicated key/value heads) count once for each holder, in the sums and in the
    number of features, so the statistics stay exact.

    Communicates: over tp. RMS norm: one all-reduce of one value per token in forward and one in backward. Layer norm:
    one all-gather of two values per token in forward, one reduce-scatter in backward.
    """

    _axis: Axis
    _sizes: tuple[int, ...]
    _formula: NormFormula

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Args: x and gate `[..., features]`, per rank `[..., features / tp]`. Returns the same shape."""
        return compute_norm(self._formula, self, x, gate=gate, moments=self._moments)

    def _moments(self, values: Tensor, *, centered: bool) -> tuple[Tensor | None, Tensor]:
        """Computes `moments_of` the features of all ranks.

        The variance of a layer norm is merged from the ranks' own deviations. The mean square minus the squared mean
        would lose all digits if the mean is large.
        Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979)
        """
        group, size = self._axis.group, sum(self._sizes)
        if not centered:
            summed = values.pow(2).sum(-1, keepdim=True)
            return None, copy_to_region(reduce_from_region(summed, group), group) / size
        mean = values.sum(-1, keepdim=True) / max(1, values.shape[-1])
        local = torch.stack([mean, (values - mean).pow(2).sum(-1, keepdim=True)])
        means, deviations = gather_to_region(local, group, dim=-1)  # [..., tp]
        sizes = means.new_tensor(self._sizes)
        mean = (means * sizes).sum(-1, keepdim=True) / size
        between = (sizes * (means - mean).pow(2)).sum(-1, keepdim=True)
        return mean, (deviations.sum(-1, keepdim=True) + between) / size


def recognise_norm(module: nn.Module) -> NormFormula:
    """Returns the formula of an unsplit norm (real or meta). Raises `UnsupportedError` for other modules."""
    if (formula := norm_formula(module)) is None:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be split over its features",
            why="it computes neither an RMS norm nor a layer norm over its last dim",
            fix="replicate it: gather its input with colwise_gather_output and split again with rowwise_split_input",
        )
    return formula


def norm_formula(module: nn.Module) -> NormFormula | None:
    """Finds the formula of an unsplit norm (real or meta) by running it on random input; None for other modules."""
    weight = module._parameters.get("weight")
    shapes = {value.shape for value in module._parameters.values() if value is not None}
    if weight is None or weight.ndim != 1 or len(shapes) > 1 or any(True for _ in module.children()):
        return None
    probe = copy.deepcopy(module).to_empty(device="cpu").float()
    probe._forward_hooks.clear()
    probe._forward_pre_hooks.clear()
    generator = torch.Generator().manual_seed(0)
    size = weight.shape[0]
    with torch.no_grad():
        for name in [name for name, value in probe._parameters.items() if value is not None]:
            probe._parameters[name] = nn.Parameter(torch.rand(size, generator=generator), requires_grad=False)
        x = torch.randn(1, 3, size, generator=generator) + 0.5  # a group norm would take the second dim's features
        gate = torch.randn(1, 3, size, generator=generator)
        takes_gate = len(inspect.signature(probe.forward).parameters) > 1
        try:
            expected = probe(x, gate) if takes_gate else probe(x)
        except (TypeError, RuntimeError, ValueError, IndexError, AttributeError):
            return None
        if not isinstance(expected, Tensor) or expected.shape != x.shape:
            return None
        for centered, offset, place in itertools.product(
            (False, True), (0.0, 1.0), ("before", "after") if takes_gate else ("none",)
        ):
            formula = NormFormula(centered=centered, offset=offset, gate=place)
            given = gate if takes_gate else None
            if torch.allclose(compute_norm(formula, probe, x, gate=given), expected, atol=1e-4, rtol=1e-4):
                return formula
    return None


def epsilon_of(module: object) -> float:
    """Returns the epsilon of a norm module; 0 if it has none."""
    for name in _EPSILON_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return 0.0
