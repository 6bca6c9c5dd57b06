"""What tests of checkpoints train, and how they look at what came of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

import shardwise
from shardwise.checkpoint.collect import common_state
from shardwise.comm.collectives import all_gather_objects
from shardwise.optim.gradients import gradients_of
from shardwise.parameters.canonical import canonical_tensors
from shardwise.parameters.registry import find_parameters, local_part
from tests.families import rows_of, tiny_batch, tiny_model

ROWS = 12
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-6, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-6, amsgrad=True),
}
GROUPS = ({"max_dims": 1, "weight_decay": 0.0}, {"params": "**.0.**", "lr": 2e-2})
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "llama-1kv": {"num_key_value_heads": 1, "tied": True, "vocab_size": 97},
    "gpt2": {"tied": True},
    "phi3": {"num_key_value_heads": 1},
    "mixtral": {"num_key_value_heads": 2, "router_aux_loss_coef": 0.0},
    "qwen3": {"num_key_value_heads": 2},
    "bert": {},
    "t5": {"tie_word_embeddings": True},
}
VARIANTS = {
    "llama-tied": {"num_key_value_heads": 2, "tied": True, "vocab_size": 97},
    "llama-1kv-untied": {"num_key_value_heads": 1},
}
"""What `make drill` takes besides."""

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that say how it computes, not what: layouts choose their own."""


class Training:
    """A tiny model on a mesh, its optimizer, its schedule and its batch.

    Args:
        lost: whether its weights are not those of the family, but to be loaded.
    """

    def __init__(self, mesh: Any, family: str, optimizer: str = "adamw", *, lost: bool = False, **options: Any) -> None:
        chosen = {**{**FAMILIES, **VARIANTS}[family], **options.pop("model", {})}
        whole = tiny_t5(**chosen) if family == "t5" else tiny_model(family.split("-")[0], **chosen)
        self.batch = tiny_batch(whole, rows=ROWS)
        if lost:
            for parameter in whole.parameters():
                parameter.data.mul_(1.5)
        self.mesh = mesh
        self.model = shardwise.parallelize(whole, mesh, **options)
        made = OPTIMIZERS[optimizer]
        self.optimizer = shardwise.build_optimizer(self.model, made.func, groups=GROUPS, **made.keywords)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self._step = shardwise.TrainStep(self.model, mesh, num_microbatches=mesh.size("pp"))

    def steps(self, number: int) -> list[float]:
        """Takes steps; returns their losses."""
        losses = []
        for _ in range(number):
            losses.append(float(self._step(rows_of(self.batch, self.mesh)).loss))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return losses

    def save(self, path: Any, **options: Any) -> Any:
        """Saves everything."""
        saved = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule}
        return shardwise.save_checkpoint(path, **{**saved, **options})

    def load(self, path: Any, tag: str | None = None, **options: Any) -> Any:
        """Loads everything."""
        saved = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule}
        return shardwise.load_checkpoint(path, tag, **{**saved, **options})

    def loss_scale(self) -> dict[str, float] | None:
        """Of float16: its value, and since how many steps it has that."""
        scale = gradients_of(self.model).loss_scale
        return None if scale is None else scale.state_dict()

    def whole(self) -> dict[str, Any]:
        """Every full tensor of the model and the optimizer, and every number of it."""
        found: dict[str, Any] = dict(shardwise.full_state_dict(self.model))
        options = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        numbers: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for name, parameter, _ in find_parameters(self.model):
            group = options[id(parameter)]
            numbers[f"{name}: options"] = {key: value for key, value in group.items() if key not in ("params", *HOW)}
            for state, value in self.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    assert local_part(value).shape == local_part(parameter).shape
                    tensors.setdefault(state, {})[name] = value
                else:
                    numbers[f"{name}: {state}"] = value.clone() if isinstance(value, torch.Tensor) else value
        everyone = all_gather_objects((numbers, sorted(tensors)), self.mesh.group())
        for each, _ in everyone:  # those of other stages
            found.update(each)
        for state in sorted({state for _, states in everyone for state in states}):
            for name, value in canonical_tensors(self.model, tensors.get(state, {})):
                found[f"{name}: {state}"] = value
        found["schedule"] = common_state(self.schedule.state_dict())  # rates are in the options
        return found


def tiny_t5(**overrides: Any) -> torch.nn.Module:
    """An encoder and a decoder, whose embedding is a head, too; every parameter is off its initial value."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **overrides)
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what is not the same in both, bit for bit."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:5]
    return [
        name
        for name, value in a.items()
        if not (torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name])
    ]
