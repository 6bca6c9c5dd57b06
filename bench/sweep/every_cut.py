"""A tiny model of four layers, cut before every layer, beside the whole one: all stages in one process."""

from __future__ import annotations

import copy
import time

from torch import Tensor

from shardwise.probe.layer_order import find_layer_order, train_in_stages
from shardwise.proof.parity import Tolerance
from shardwise.tiny.inputs import clone_batch, loss_or_surrogate
from shardwise.tiny.models import build_tiny_model, make_batch, set_runnable_mode, shrink_config
from sweep.known import default_config, model_class
from sweep.stages import gradients_of, stages_of

__all__ = ["prove_every_cut"]

_NUM_LAYERS = 4


def prove_every_cut(model_type: str, task: str, class_name: str) -> dict[str, object]:
    """Loss, logits and every gradient of one step, and how often what crosses which cut.

    Returns:
        Of a row: result, cause, and what was measured.

    Raises:
        PlanError: the model cannot be cut; says why.
    """
    config = shrink_config(default_config(model_type, task=task), num_layers=_NUM_LAYERS, without_dropout=True)
    tiny = build_tiny_model(config, model_class(class_name), seed=0)
    batch = make_batch(tiny, seed=0)
    set_runnable_mode(tiny, batch)
    start = time.perf_counter()
    order = find_layer_order(tiny)
    seconds = time.perf_counter() - start
    whole = copy.deepcopy(tiny)
    stages = stages_of(tiny, order)
    output, sent = train_in_stages(stages, batch)
    expected = whole(**clone_batch(batch))
    loss_or_surrogate(expected).backward()
    allowed = Tolerance()
    found = [_off("loss", loss_or_surrogate(output), loss_or_surrogate(expected), allowed.loss)]
    for name, value in expected.items():
        if isinstance(value, Tensor) and "logits" in name:
            found.append(_off(name, output[name], value, allowed.logits))
    gradients = gradients_of(stages, whole)
    for name, parameter in whole.named_parameters():
        gradient = parameter.grad
        if gradient is None or not gradient.numel() or not gradient.any():
            if name in gradients and bool(gradients[name].any()):
                found.append(f"{name} has a gradient, and none in the whole model")
        elif name not in gradients:
            found.append(f"{name} has no gradient")
        else:
            bound = allowed.gradient * float(gradient.abs().max()) + allowed.gradient_floor
            found.append(_off(f"gradient of {name}", gradients[name], gradient, bound))
    causes = [each for each in found if each]
    return {
        "result": "wrong" if causes else "ok",
        "cause": "; ".join(causes[:3]),
        "share": 0.0,
        "block_share": 0.0,
        "split_seconds": round(seconds, 3),
        "cut_tensor": [len(values) for values in sent],
    }


def _off(name: str, value: Tensor, expected: Tensor, allowed: float) -> str:
    """What is wrong with `value`, in words; nothing where it is as expected."""
    error = float((value - expected).detach().abs().max())
    return "" if error <= allowed else f"{name} off by {error:.1e}, {allowed:.1e} allowed"
