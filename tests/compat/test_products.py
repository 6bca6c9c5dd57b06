"""Steps, clipping, saving, loading and optimizers of the three packages, at products of layouts and options.

Each case trains three steps, saves after the second, and trains the third again from what it has loaded. Losses,
gradients and weights equal those of the unsplit model. `make test` takes cases in which every system meets
every option, `make coverage` takes all of them.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.nemo_automodel.distributed.parallelizer import nvfsdp_strategy_parallelize
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state, xm
from shardwise.compat.neuronx_distributed.optimizer import NeuronZero1Optimizer
from shardwise.compat.neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_cross_entropy,
)
from shardwise.compat.optimum_neuron.distributed import Parallelizer, make_optimizer_constructor_lazy
from shardwise.parameters.registry import registry_of
from tests.families import FULL_PRODUCT, tiny_model
from tests.oracle import LOSS, differing, differing_gradients

pytestmark = pytest.mark.spawn

HIDDEN, WORDS, LENGTH = 8, 20, 4
MAX_NORM = 0.05  # below every norm here: each step clips

OPTIONS = {
    "degrees": [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)],  # tp, pp, data
    "system": ["nxd", "nxd by hand", "nxd guide", "optimum", "nemo"],
    "zero": [False, True],
    "number": [1, 2],  # microbatches
    "model": ["plain", "tied", "sequence"],
    "start": ["real", "meta", "filled", "assigned", "planned from meta"],  # how parameters came to their values
}


def is_offered(degrees, system, zero, number, model, start):
    """Whether the system's document has such a combination."""
    has_stages = degrees[1] > 1
    if system in ("nxd guide", "nemo") and (has_stages or number > 1):
        return False
    if start == "assigned" and (has_stages or model == "tied"):  # torch unties them
        return False
    if system == "nxd guide" and start == "filled":
        return False
    if system in ("nxd by hand", "nxd guide"):
        return not (has_stages and model == "sequence") and start != "planned from meta"
    return start == "real" or (start == "planned from meta" and system == "nxd")


def chosen():
    """Cases such that every system meets every option that it can be combined with, and models that tp splits start in
    every way. Layouts of two axes are there, and every system in one of them.
    """
    names = list(OPTIONS)
    cases = [case for case in itertools.product(*OPTIONS.values()) if is_offered(*case)]
    if FULL_PRODUCT:
        return cases

    def combined(case):
        options = dict(zip(names, case, strict=True))
        degrees, system = options["degrees"], options["system"]
        if math.prod(degrees) > 2:
            return {degrees, ("two axes", system)}
        start = {(options["model"], options["start"])} if degrees[0] > 1 else set()
        shared = {(system, "shared states")} if options["zero"] and degrees[2] > 1 else set()
        return {(system, *each) for each in options.items()} | start | shared

    missing, taken = set().union(*map(combined, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(combined(case) & missing) / math.prod(case[0]))  # ranks cost
        taken.append(best)
        missing -= combined(best)
    return sorted(taken)


class Block(nn.Module):
    def __init__(self, parallel, sequence):
        super().__init__()
        options = {"sequence_parallel_enabled": sequence, "sequence_dimension": 1} if sequence else {}
        self.norm = LayerNorm(HIDDEN, sequence_parallel_enabled=sequence) if parallel else nn.LayerNorm(HIDDEN)
        self.up = (
            ColumnParallelLinear(HIDDEN, 12, gather_output=False, **options) if parallel else nn.Linear(HIDDEN, 12)
        )
        self.down = (
            RowParallelLinear(12, HIDDEN, input_is_parallel=True, **options) if parallel else nn.Linear(12, HIDDEN)
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """A language model written by hand, of parallel layers or of torch's."""

    def __init__(self, kind, parallel=True):
        super().__init__()
        torch.manual_seed(0)
        self.parallel, self.sequence = parallel, kind == "sequence"
        options = {"sequence_parallel_enabled": True, "sequence_dimension": 1} if self.sequence else {}
        self.embed = ParallelEmbedding(WORDS, HIDDEN, **options) if parallel else nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Block(parallel, self.sequence) for _ in range(3))
        self.norm = LayerNorm(HIDDEN, sequence_parallel_enabled=self.sequence) if parallel else nn.LayerNorm(HIDDEN)
        self.head = (
            ColumnParallelLinear(HIDDEN, WORDS, bias=False, gather_output=False, **options)
            if parallel
            else nn.Linear(HIDDEN, WORDS, bias=False)
        )
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        if not self.parallel:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return parallel_cross_entropy(logits, labels).sum() / (labels != -100).sum()


def fill(module, device=None):
    """A `param_init_fn`: gives modules the values that they start with."""
    torch.manual_seed(5)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def unsplit(system, kind):
    if system in ("nxd by hand", "nxd guide"):
        return Words(kind, parallel=False)
    return tiny_model("llama", num_hidden_layers=3, num_key_value_heads=2, vocab_size=WORDS, tied=kind == "tied")


def batch_of(step):
    """Four rows, whose numbers of targets differ much between data ranks and microbatches."""
    ids = torch.randint(3, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[1, 1:] = labels[3] = labels[2, 2:] = -100
    return {"input_ids": ids, "labels": labels}


class Split:
    """The model and its optimizer as a script of `system` makes them."""

    def __init__(self, mesh, degrees, system, zero, number, model, start):
        self.system, self.number, self.zero = system, number, zero
        tp, pp, self.data = degrees
        self.schedule = None
        build = {"nxd": self._nxd, "nxd by hand": self._nxd, "nxd guide": self._guide, "optimum": self._optimum}
        if system == "nemo":
            self._nemo(degrees, model)
        else:
            build[system](tp, pp, model, start)
        self.model.train()

    def _nxd(self, tp, pp, kind, start):
        self.config = nxd.neuronx_distributed_config(
            tp,
            pp,
            pipeline_config={"num_microbatches": self.number},
            optimizer_config={"zero_one_enabled": self.zero, "grad_clipping": True, "max_grad_norm": MAX_NORM},
            sequence_parallel=kind == "sequence",
            model_init_config={
                "meta_device_init": start in ("meta", "filled", "planned from meta"),
                "param_init_fn": fill if start == "filled" else None,
            },
        )
        by_hand = self.system == "nxd by hand"
        build = (lambda: assigned(Words(kind), start)) if by_hand else (lambda: unsplit(self.system, kind))
        self.model = nxd.initialize_parallel_model(self.config, build)
        self.optimizer = nxd.initialize_parallel_optimizer(
            self.config, torch.optim.AdamW, self.model.parameters(), lr=1e-3
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def _guide(self, tp, pp, kind, start):
        parallel_state.initialize_model_parallel(tp, pp)
        with torch.device("meta") if start == "meta" else torch.device("cpu"):
            self.model = Words(kind)
        if start == "meta":
            self.model.to_empty(device="cpu")
            for module in self.model.modules():
                fill(module)
            if kind == "tied":
                self.model.head.weight = self.model.embed.weight
        parallel_layers.move_model_to_device(assigned(self.model, start), "cpu")
        new = NeuronZero1Optimizer if self.zero else torch.optim.AdamW
        options = {"optimizer_class": torch.optim.AdamW, "max_norm": MAX_NORM} if self.zero else {}
        self.optimizer = new(self.model.parameters(), lr=1e-3, **options)

    def _optimum(self, tp, pp, kind, start):
        parallel_state.initialize_model_parallel(tp, pp)
        model = unsplit(self.system, kind)
        lazy = make_optimizer_constructor_lazy(torch.optim.AdamW)(model.parameters(), lr=1e-3)
        before = {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)}
        self.model = Parallelizer.parallelize(
            model,
            sequence_parallel_enabled=kind == "sequence",
            pipeline_parallel_num_microbatches=self.number,
            pipeline_parallel_use_zero1_optimizer=False,
        )
        after = dict(self.model.named_parameters())
        moved = {key: after[name] for name, key in before.items() if name in after}
        self.optimizer = Parallelizer.optimizer_for_mp(lazy, moved)

    def _nemo(self, degrees, kind):
        names = ("data_parallel", "tensor_parallel")
        device_mesh = init_device_mesh("cpu", (degrees[2], degrees[0]), mesh_dim_names=names)
        self.model = nvfsdp_strategy_parallelize(
            unsplit(self.system, kind),
            device_mesh,
            data_parallel_sharding_strategy="optim" if self.zero else "optim_grads_params",
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, batch):
        """The loss; gradients are there afterwards."""
        if self.system in ("nxd", "nxd by hand", "optimum"):
            return self.model.run_train(**batch)
        loss = self.model(**batch)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        return loss.detach()

    def update(self):
        if self.system == "optimum" or (self.system == "nxd guide" and not self.zero):
            parallel_layers.clip_grad_norm(self.model.parameters(), MAX_NORM)
        elif self.system == "nemo":
            shardwise.clip_grad_norm_(self.model, MAX_NORM)
        if self.system == "nxd guide":
            xm.optimizer_step(self.optimizer)
        else:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()

    def save(self, place):
        if self.system in ("nxd", "nxd by hand"):
            nxd.save_checkpoint(place, "two", self.model, self.optimizer, self.schedule, {"steps": 2})
        elif self.system == "optimum":
            Parallelizer.save_model_sharded_checkpoint(self.model, place, optimizer=self.optimizer)
        elif self.system == "nemo":
            shardwise.save_checkpoint(place, model=self.model, optimizer=self.optimizer)
        else:
            parallel_layers.save({"model": self.model.state_dict()}, place)
            if self.zero:
                self.optimizer.save_sharded_state_dict(place)
            else:
                parallel_layers.save({"optimizer": self.optimizer.state_dict()}, f"{place}/optimizer")

    def load(self, place):
        if self.system in ("nxd", "nxd by hand"):
            content = nxd.load_checkpoint(place, "two", self.model, self.optimizer, self.schedule)
            assert content == {"steps": 2}
        elif self.system == "optimum":
            Parallelizer.load_sharded_checkpoint(place, self.model, self.optimizer)
        elif self.system == "nemo":
            shardwise.load_checkpoint(place, model=self.model, optimizer=self.optimizer)
        else:
            parallel_layers.load(place, model_or_optimizer=self.model)
            if self.zero:
                self.optimizer.load_sharded_state_dict(place)
            else:
                parallel_layers.load(f"{place}/optimizer", self.optimizer, model_key="optimizer")

    def rows(self, batch):
        mesh = registry_of(self.model).mesh
        return {name: value.chunk(mesh.data_size)[mesh.data_rank] for name, value in batch.items()}


def assigned(model, start):
    """With parameters that are others than those that the layers made."""
    if start == "assigned":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def expected_of(whole, batch, data, *, over_tokens):
    """Loss and gradients: a mean over all tokens, or the mean of the data ranks' means."""
    parts = [batch] if over_tokens else [{k: v.chunk(data)[i] for k, v in batch.items()} for i in range(data)]
    losses = []
    for part in parts:
        out = whole(**part)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        (loss / len(parts)).backward()
        losses.append(loss.detach())
    return losses


def trains(mesh, degrees, system, zero, number, model, start, directory):
    """What is otherwise than of the unsplit model, in words."""
    torch.manual_seed(0)
    parallel_state.destroy_model_parallel()
    split = Split(mesh, degrees, system, zero, number, model, start)
    whole = unsplit(system, model).train()
    whole.load_state_dict(shardwise.full_state_dict(split.model))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if split.schedule is not None else None
    over_tokens = system in ("nxd", "optimum") or split.data == 1
    problems = []
    for step in range(3):
        batch = batch_of(step)
        losses = expected_of(whole, batch, split.data, over_tokens=over_tokens)
        loss = split.backward(split.rows(batch))
        data_rank = registry_of(split.model).mesh.data_rank
        problems += differing(f"loss {step}", loss, losses[0 if len(losses) == 1 else data_rank], LOSS)
        gradients = {name: value.grad for name, value in whole.named_parameters()}
        problems += differing_gradients(shardwise.full_gradients(split.model), gradients)
        nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        split.update()
        if step == 1:
            split.save(directory)
    problems += weights_of(split.model, whole)
    parallel_state.destroy_model_parallel()
    again = Split(mesh, degrees, system, zero, number, model, start)
    again.load(directory)
    again.backward(again.rows(batch_of(2)))
    again.update()
    problems += [f"resumed: {each}" for each in weights_of(again.model, whole)]
    parallel_state.destroy_model_parallel()
    return problems


def weights_of(model, whole):
    state = shardwise.full_state_dict(model)
    return [
        problem for name, value in whole.state_dict().items() for problem in differing(name, state[name], value, 2e-5)
    ]


def named(case):
    (tp, pp, data), system, zero, number, model, start = case
    return f"{system}-tp{tp}.pp{pp}.dp{data}-{'zero-' * zero}{number}-{model}-{start}".replace(" ", "_")


@pytest.mark.parametrize(
    ("layout", "degrees", "system", "zero", "number", "model", "start"),
    [pytest.param(f"tp{case[0][0] * case[0][1] * case[0][2]}", *case, id=named(case)) for case in chosen()],
)
def test_it_trains_as_the_unsplit_model(on_ranks, layout, degrees, system, zero, number, model, start, tmp_path):
    found = on_ranks(trains, directory=str(tmp_path))
    assert found == [[]] * len(found)
