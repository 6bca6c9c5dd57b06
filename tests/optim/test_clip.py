"""`clip_grad_norm_` gives torch's norm of the unsplit model: replicas count once, whatever is passed."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise.optim.summing import multiply_gradients
from shardwise.ranks.spawn import spawn
from tests.families import tiny_batch, tiny_model
from tests.oracle import differing_gradients

pytestmark = pytest.mark.spawn

ORDERS = (1.0, 2.0, 3.5, math.inf)


CASES = {"llama": ({"num_key_value_heads": 2}, True), "phi3": ({"num_key_value_heads": 1, "tied": True}, False)}


@functools.lru_cache(maxsize=1)
def models(mesh, family):
    options, sequence_parallel = CASES[family]
    whole = tiny_model(family, num_hidden_layers=1, **options)
    return whole, shardwise.parallelize(copy.deepcopy(whole), mesh, sequence_parallel=sequence_parallel)


def whole_model(model):
    return model


def every_parameter(model):
    return list(model.parameters())


def some_parameters(model):
    return (
        value for name, value in model.named_parameters() if "qkv_proj" in name or "k_proj" in name or "norm" in name
    )


def one_parameter(model):
    return next(value for name, value in model.named_parameters() if "norm" in name)


def compare(mesh, family, select, order, max_norm):
    """Problems of the norm of selected parameters, and of all gradients after clipping them."""
    whole, split = models(mesh, family)
    for model in (whole, split):
        model.zero_grad()
        model(**tiny_batch(whole)).loss.backward()
    parameters = select(whole)
    parameters = parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm, order)
    norm = shardwise.clip_grad_norm_(select(split), max_norm, order)
    problems = []
    if not math.isclose(float(norm), float(expected), rel_tol=1e-5) or norm.dtype != torch.float32:
        problems.append(f"norm {norm}, not {expected}")
    gradients = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
    return problems + differing_gradients(shardwise.full_gradients(split), gradients)


@pytest.mark.parametrize(
    ("select", "order", "max_norm"),
    [
        *((whole_model, order, max_norm) for order, max_norm in zip(ORDERS, (0.1, math.inf) * 2, strict=True)),
        *((every_parameter, order, max_norm) for order, max_norm in zip(ORDERS, (1e6, 0.1) * 2, strict=True)),
        *((select, 2.0, 0.01) for select in (some_parameters, one_parameter)),
    ],
)
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("layout", ["tp1", "tp4"])
def test_the_norm_is_that_of_the_whole_model(on_ranks, layout, family, select, order, max_norm):
    for problems in on_ranks(compare):
        assert not problems


def edge_cases(layout):
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh)
        without = float(shardwise.clip_grad_norm_(model, 1.0))
        shardwise.TrainStep(model, mesh)(tiny_batch(model))
        if mesh.rank == 0:  # a fault that one rank sees alone
            model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = torch.nan
        norm = float(shardwise.clip_grad_norm_(model, math.inf))
        with pytest.raises(RuntimeError, match="nan") as raised:
            shardwise.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        return without, norm, str(raised.value)


def test_no_gradients_have_norm_zero_and_a_nan_of_one_rank_is_seen_by_all():
    ranks = spawn(edge_cases, 2, "tp2")
    assert all(without == 0.0 and math.isnan(norm) for without, norm, _ in ranks)
    assert len({text for *_, text in ranks}) == 1


class OneDevice(TorchDispatchMode):
    """Raises where an operation takes tensors of two devices, as one on a card does; copies may."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {value.device for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        if func.overloadpacket.__name__ not in ("_to_copy", "copy_"):
            assert len(devices) <= 1, f"{func} over {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.single
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_gradients_of_two_devices_are_clipped_as_one_each(order):
    """As with `cpu_offload`: what FSDP2 manages is on the host, what is kept in full on the card."""
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.ones(2, 3, device=device)) for device in ("cpu", "cuda", "cpu", "cuda")]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with OneDevice():
            assert shardwise.clip_grad_norm_(parameters, 1.0, order).device.type == "cuda"
            multiply_gradients(parameters, torch.ones((), device="cuda"))
