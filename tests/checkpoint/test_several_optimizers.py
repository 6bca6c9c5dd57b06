"""Several optimizers of one model are saved whole, and go on at any other layout as the unsplit model does."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise.cli.main import main
from shardwise.errors import ConfigError, LoadError
from shardwise.ranks.spawn import spawn
from tests.families import rows_of, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

ROWS = 4


def optimizers_of(model):
    """Of matrices, of the rest, and of the final norm, which the second has too; each with a schedule."""
    named = dict(model.named_parameters())
    matrices = [value for value in named.values() if value.ndim == 2]
    rest = [value for value in named.values() if value.ndim == 1]
    norm = [value for name, value in named.items() if "layernorm" in name]
    optimizers = {
        "matrices": torch.optim.SGD(matrices, lr=1e-2, momentum=0.9),
        "rest": torch.optim.AdamW(rest, lr=1e-2, eps=1e-6),
        "norms": torch.optim.AdamW(norm, lr=5e-3, eps=1e-6),
    }
    return optimizers, {
        name: torch.optim.lr_scheduler.MultiStepLR(each, [2, 4], gamma=0.5) for name, each in optimizers.items()
    }


def steps(number, forward, optimizers, schedulers):
    losses = []
    for _ in range(number):
        losses.append(float(forward()))
        for each in optimizers.values():
            each.step()
        for each in optimizers.values():
            each.zero_grad()
        for each in schedulers.values():
            each.step()
    return losses


class Split:
    """A split model with several optimizers."""

    def __init__(self, mesh, *, lost=False):
        whole = tiny_model("llama", num_key_value_heads=2)
        batch = tiny_batch(whole, rows=ROWS)
        if lost:
            for parameter in whole.parameters():
                parameter.data.mul_(1.5)
        self.model = shardwise.parallelize(whole, mesh)
        self.optimizers, self.schedulers = optimizers_of(self.model)
        self._step = shardwise.TrainStep(self.model, mesh, num_microbatches=mesh.size("pp"))
        self._batch = rows_of(batch, mesh)

    def steps(self, number):
        return steps(number, lambda: self._step(self._batch).loss, self.optimizers, self.schedulers)

    def given(self, as_list=False):
        optimizers, schedulers = self.optimizers, self.schedulers
        if as_list:
            optimizers, schedulers = list(optimizers.values()), list(schedulers.values())
        return {"model": self.model, "optimizer": optimizers, "scheduler": schedulers}


def save(path, as_list):
    with shardwise.Mesh.open("tp2") as mesh:
        split = Split(mesh)
        split.steps(3)
        shardwise.save_checkpoint(path, step=3, **split.given(as_list))


def resume(path, layout, as_list):
    with shardwise.Mesh.open(layout) as mesh:
        split = Split(mesh, lost=True)
        extra = shardwise.load_checkpoint(path, **split.given(as_list))
        return extra, split.steps(3), shardwise.full_state_dict(split.model)


@pytest.mark.parametrize(("as_list", "layouts"), [(False, ("fsdp2", "pp2")), (True, ("ddp2",))])
def test_each_goes_on_as_in_the_unsplit_model(tmp_path, capsys, as_list, layouts):
    model = tiny_model("llama", num_key_value_heads=2)
    batch = tiny_batch(model, rows=ROWS)
    model.train()

    def forward():
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    losses = steps(6, forward, *optimizers_of(model))
    spawn(save, 2, tmp_path, as_list)
    for layout in layouts:
        for extra, again, state in spawn(resume, 2, tmp_path, layout, as_list):
            assert extra == {"step": 3}
            assert again == pytest.approx(losses[3:], abs=1e-5)
            assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in model.state_dict().items())
    assert main(["inspect", str(tmp_path)]) == 0
    assert f"  optimizer  {'1' if as_list else 'rest'}: torch.optim.adamw.AdamW, 1 group" in capsys.readouterr().out


@pytest.fixture(scope="module")
def split():
    return Split(shardwise.Mesh.open("tp1"))


@pytest.fixture(scope="module")
def saved(split, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    split.steps(1)
    sgd, *_ = split.optimizers.values()
    shardwise.save_checkpoint(root, tag="three", **split.given())
    shardwise.save_checkpoint(root, tag="two", model=split.model, optimizer=list(split.optimizers.values())[:2])
    shardwise.save_checkpoint(root, tag="one", model=split.model, optimizer=sgd)
    return root


@pytest.mark.single
@pytest.mark.parametrize(
    ("tag", "names", "says"),
    [
        (
            "three",
            ["matrices", "rest"],
            r"holds the optimizers 'matrices', 'rest', 'norms', and is loaded into .*rest'$",
        ),
        ("three", None, r"the optimizers 'matrices', 'rest', 'norms', and is loaded into the optimizers '0', '1', '2'"),
        ("two", "matrices", r"holds the optimizers '0', '1', and is loaded into one optimizer without a name"),
        ("one", ["matrices"], r"holds one optimizer without a name, and is loaded into the optimizers 'matrices'"),
        ("one", "rest", r"the state of torch.optim.sgd.SGD, the optimizer is torch.optim.adamw.AdamW"),
    ],
)
def test_other_optimizers_than_were_saved_are_named(split, saved, tag, names, says):
    optimizers = split.optimizers
    chosen = (
        list(optimizers.values()) if names is None else {name: optimizers[name] for name in names if name in optimizers}
    )
    if isinstance(names, str):
        chosen = optimizers[names]
    with pytest.raises(LoadError, match=f"(?m){says}"):
        shardwise.load_checkpoint(saved, tag, model=split.model, optimizer=chosen)


@pytest.mark.single
def test_an_optimizer_of_the_wrong_kind_is_named(split, saved, tmp_path):
    swapped = {**split.optimizers, "rest": split.optimizers["matrices"]}
    with pytest.raises(LoadError, match=r"the state of \S*AdamW, the optimizer 'rest' is \S*SGD"):
        shardwise.load_checkpoint(saved, "three", model=split.model, optimizer=swapped)
    other = {**split.schedulers, "rest": torch.optim.lr_scheduler.StepLR(split.optimizers["rest"], 2)}
    with pytest.raises(LoadError, match="no state of a StepLR for 'rest': that of a MultiStepLR"):
        shardwise.load_checkpoint(saved, "three", model=split.model, scheduler=other)
    with pytest.raises(ConfigError, match="the optimizer '1' is a str"):
        shardwise.save_checkpoint(tmp_path, model=split.model, optimizer=[split.optimizers["rest"], "SGD"])


@pytest.mark.single
def test_one_in_a_list_is_one_and_a_partial_one_is_saved_alone(split, saved):
    """A list of one has the format of one; an optimizer of a part of the parameters is legitimate."""
    shardwise.load_checkpoint(saved, "one", model=split.model, optimizer=[split.optimizers["matrices"]])
    shardwise.load_checkpoint(saved, "three", optimizer=split.optimizers)  # the states alone


@pytest.mark.single
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": "3"}, "step is '3'"),
        ({"step": 3, "extra": [1]}, "step=3 with an extra that is a list"),
    ],
)
def test_a_step_that_is_none_is_named(split, tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        shardwise.save_checkpoint(tmp_path, model=split.model, **options)


@pytest.mark.single
def test_the_step_joins_a_dictionary(split, tmp_path):
    assert shardwise.save_checkpoint(tmp_path, model=split.model, extra={"epoch": 1}, step=7).wait() == "step-7"
    assert shardwise.load_checkpoint(tmp_path) == {"epoch": 1, "step": 7}
