"""Parameter groups of split models, and any optimizer class over them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.api.rehearsal import fake_mesh
from shardwise.compat.layers.by_hand import adopt_model
from shardwise.compat.neuronx_distributed.optimizer import build_sharded
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.optim.gradients import LossScale, gradients_of
from shardwise.optim.steps import can_skip_on_device, stepping_class
from shardwise.parameters.registry import registry_of
from shardwise.ranks.spawn import spawn
from tests.families import rows_of, tiny_batch, tiny_model


def build(groups):
    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3, weight_decay=0.1, groups=groups)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.single
def test_the_first_rule_that_fits_holds():
    found = build([{"params": "model.layers.0.**", "lr": 1e-5}, {"max_dims": 1, "weight_decay": 0.0}])
    assert found["model.layers.0.input_layernorm.weight"] == (1e-5, 0.1)
    assert found["model.layers.1.input_layernorm.weight"] == (1e-3, 0.0)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1e-3, 0.1)
    assert len(found) == 21


@pytest.mark.single
def test_a_function_may_choose():
    found = build(lambda name, parameter: {"weight_decay": 0.0} if "norm" in name else {})
    assert {decay for name, (_, decay) in found.items() if "norm" in name} == {0.0}
    assert {decay for name, (_, decay) in found.items() if "norm" not in name} == {0.1}


@pytest.mark.single
@pytest.mark.parametrize(
    ("rule", "message"),
    [({"params": "**.bias", "lr": 1.0}, "fits no parameter"), ({"weight_decay": 0.0}, "does not say which")],
)
def test_rules_that_mean_nothing_are_errors(rule, message):
    with pytest.raises(ConfigError, match=message):
        build([rule])


@pytest.mark.single
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_an_optimizer_goes_on_like_it(copied):
    linear = torch.nn.Linear(3, 2)
    optimizer = stepping_class(torch.optim.AdamW)(linear.parameters(), lr=0.1)
    linear(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    other = copied(optimizer)
    parameters = [value for group in other.param_groups for value in group["params"]]
    for value, like in zip(parameters, linear.parameters(), strict=True):
        value.grad = like.grad.clone()
    optimizer.step()
    other.step()
    assert type(other) is type(optimizer)
    assert all(torch.equal(*each) for each in zip(parameters, linear.parameters(), strict=True))


@pytest.mark.single
def test_options_that_look_different_in_every_process_are_no_difference_between_ranks():
    seen = []
    for _ in range(2):  # as two ranks would
        with shardwise.Mesh.open("tp1") as mesh:
            model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(torch.tensor(0.9), torch.tensor(0.99)))
            optimizer.defaults["schedule"] = optimizer.param_groups[0]["schedule"] = object()
            optimizer.step()
            seen.append(str(registry_of(model).context.steps))
    assert seen[0] == seen[1] and "'lr': 0.001" in seen[0] and "tensor" not in seen[0]


@pytest.mark.single
@pytest.mark.parametrize("fused", [True, False])
def test_ranks_to_which_zero_gives_no_parameters_learn_of_bad_steps_as_the_others_do(fused):
    build, device = stepping_class(torch.optim.AdamW), torch.device("cpu")
    some, none = (build([{"params": each}], fused=fused) for each in ([torch.nn.Parameter(torch.ones(1))], []))
    assert can_skip_on_device(some, device) is can_skip_on_device(none, device) is fused


def step_with_zero(mesh):
    """Two steps with torch's ZeRO, which gives the only parameter that is trained to one of the ranks."""
    model = tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=False).requires_grad_(False)
    model.lm_head.weight.requires_grad_()
    adopt_model(model, mesh)
    optimizer = build_sharded([model.lm_head.weight], torch.optim.AdamW, mesh, lr=1e-3)
    step, batch = shardwise.TrainStep(model, mesh), tiny_batch(model, rows=2)
    registry_of(model).precision = shardwise.Precision(compute="float32", nonfinite="skip")
    gradients = gradients_of(model)
    gradients.loss_scale = LossScale(mesh.device, value=2.0)
    losses = []
    for is_bad in (False, True, False):
        losses.append(float(step(batch).loss))
        if is_bad:
            model.lm_head.weight.grad[0, 0] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
    return losses, registry_of(model).context.steps.count, float(gradients.loss_scale.factor)


@pytest.mark.spawn
def test_ranks_on_which_zero_updates_nothing_have_stepped_too_and_left_out_the_same_step(on_ranks):
    first, second = on_ranks(step_with_zero, layout="ddp2")
    losses, num_steps, scale = first
    assert first == second and num_steps == 6 and scale == 1.0 and losses[2] == losses[1] < losses[0]


@pytest.mark.single
def test_an_optimizer_that_makes_no_step_is_an_error_when_it_is_built():
    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh)
        with pytest.raises(UnsupportedError, match="does not support dense gradients"):
            shardwise.build_optimizer(model, torch.optim.SparseAdam, lr=1e-3)


class Drawing(torch.optim.SGD):
    """Rounds parameters in bfloat16 at random, as libraries do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                local = getattr(parameter, "_local_tensor", parameter)
                if local.dtype is torch.bfloat16:
                    local.data.add_(torch.rand_like(local), alpha=0.1)


class Packed(torch.Tensor):
    """Values in a form of their own."""


class Packing(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["packed"] = torch.zeros_like(parameter.data).as_subclass(Packed)


@pytest.mark.single
@pytest.mark.parametrize("layout", ["tp2", "ddp2", "fsdp2"])
def test_optimizers_that_draw_random_numbers_are_refused_where_ranks_hold_copies(layout):
    with fake_mesh(shardwise.MeshShape.parse(layout)) as mesh:
        model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1).bfloat16(), mesh)
        if layout == "fsdp2":
            assert shardwise.build_optimizer(model, Drawing, lr=1e-3, elementwise=True)
        else:
            with pytest.raises(UnsupportedError, match=r"Drawing on parameters(.|\n)*it is not elementwise"):
                shardwise.build_optimizer(model, Drawing, lr=1e-3)


class Normed(torch.optim.SGD):
    """Updates by gradients divided by their norms, as LAMB does."""

    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            parameter.grad /= parameter.grad.norm()
        super().step(closure)


class NormedMatrices(torch.optim.SGD):
    """Divides the gradients of matrices alone by their norms."""

    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.ndim == 2:
                parameter.grad /= parameter.grad.norm()
        super().step(closure)


class Scaled(torch.optim.SGD):
    """Elementwise, and not torch's."""


@pytest.mark.single
@pytest.mark.parametrize("layout", ["tp2", "ddp2"])
def test_other_classes_are_tried_on_halves_where_ranks_hold_parts(layout):
    with fake_mesh(shardwise.MeshShape.parse(layout)) as mesh:
        model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
        assert shardwise.build_optimizer(model, Scaled, lr=1e-3)
        if layout == "ddp2":
            assert shardwise.build_optimizer(model, Normed, lr=1e-3)
        else:
            with pytest.raises(UnsupportedError, match=r"Normed on parameters(.|\n)*it is not elementwise"):
                shardwise.build_optimizer(model, Normed, lr=1e-3)


@pytest.mark.single
def test_optimizers_are_tried_on_every_number_of_dims():
    with fake_mesh(shardwise.MeshShape.parse("tp2")) as mesh:
        model = tiny_model("mixtral", num_hidden_layers=1)  # its experts are stacked in three dims
        model = shardwise.parallelize(model, mesh)
        with pytest.raises(UnsupportedError, match=r"NormedMatrices on parameters(.|\n)*it is not elementwise"):
            shardwise.build_optimizer(model, NormedMatrices, lr=1e-3)


@pytest.mark.single
def test_states_of_a_librarys_own_form_are_not_saved(tmp_path):
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
        optimizer = shardwise.build_optimizer(model, Packing, lr=1e-3)
        shardwise.TrainStep(model, mesh)(tiny_batch(model))
        optimizer.step()
        with pytest.raises(UnsupportedError, match="packed of model.* a Packed"):
            shardwise.save_checkpoint(tmp_path, model=model, optimizer=optimizer)


@pytest.mark.single
@pytest.mark.filterwarnings("ignore")  # of the library, when it is imported
def test_torchaos_8_bit_states_train_like_adamw(monkeypatch):
    library = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda each: each))  # takes a minute
    losses = {}
    for optimizer_class in (torch.optim.AdamW, library.AdamW8bit):
        with shardwise.Mesh.open("tp1", device="cpu") as mesh:
            model = shardwise.parallelize(tiny_model("llama", hidden_size=128, intermediate_size=256), mesh).train()
            optimizer = shardwise.build_optimizer(model, optimizer_class, lr=1e-2)
            step, batch = shardwise.TrainStep(model, mesh), tiny_batch(model)
            found = losses[optimizer_class] = []
            for _ in range(4):
                found.append(float(step(batch).loss))
                shardwise.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    kinds = {type(value).__name__ for state in optimizer.state.values() for value in state.values()}
    assert "OptimState8bit" in kinds
    assert losses[library.AdamW8bit] == pytest.approx(losses[torch.optim.AdamW], abs=0.02)
    assert found[-1] < found[0] - 0.5


CLASSES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def update(layout):
    """The largest difference to the unsplit model's parameters after two steps with each class."""
    worst = {}
    with shardwise.Mesh.open(layout) as mesh:
        for name in CLASSES if layout == "tp2" else set(CLASSES) - {"Rprop"}:
            cls, whole = getattr(torch.optim, name), tiny_model("llama", num_hidden_layers=1)
            model = shardwise.parallelize(copy.deepcopy(whole), mesh)
            options = {"lr": 1e-3, **({"eps": 1e-4} if "eps" in cls.__init__.__code__.co_varnames else {})}
            optimizers = cls(whole.parameters(), **options), shardwise.build_optimizer(model, cls, **options)
            batch = tiny_batch(whole)
            mine = rows_of(batch, mesh)
            for _ in range(2):
                whole(**batch).loss.backward()
                shardwise.TrainStep(model, mesh)(mine)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            state = shardwise.full_state_dict(model)
            worst[name] = max(float((state[key] - value).abs().max()) for key, value in whole.state_dict().items())
            states = [value for each in optimizers[1].state.values() for value in each.values() if value.ndim]
            if layout == "fsdp2":
                assert all(isinstance(value, DTensor) for value in states), name
    return worst


def refused(mesh, name):
    """What is said to the class, whoever builds it, about parameters of which ranks hold parts."""
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
    cls, errors = getattr(torch.optim, name), []
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)  # Muon takes no others
    with pytest.raises(UnsupportedError) as raised:
        shardwise.build_optimizer(model, cls, lr=1e-3)
    errors.append(str(raised.value))
    optimizer = cls([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    optimizer.param_groups[0]["lr"] = 0.0  # as a schedule may have it
    model(**tiny_batch(model)).loss.backward()
    before = shardwise.full_state_dict(model)
    with pytest.raises(UnsupportedError) as raised:
        optimizer.step(lambda: 0.0)
    assert all(torch.equal(value, before[key]) for key, value in shardwise.full_state_dict(model).items())
    return [*errors, str(raised.value)]


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout in ("tp2", "fsdp2") for name in ("Muon", "Adafactor", "LBFGS")] + [("fsdp2", "Rprop")],
)
def test_what_is_not_elementwise_is_refused(on_ranks, layout, name):
    first, second = on_ranks(refused)
    assert first == second
    for text in first:
        assert f"{name} on parameters of this split model" in text
        assert ("cannot update DTensors" if name == "Rprop" else "it is not elementwise") in text


def update_copies(mesh, name):
    """Over ddp alone parameters are in one piece."""
    full = tiny_model("llama", num_hidden_layers=1)
    model = shardwise.parallelize(copy.deepcopy(full), mesh)
    for each in (*full.parameters(), *model.parameters()):
        each.requires_grad_(each.ndim == 2)
    cls, batch = getattr(torch.optim, name), tiny_batch(full)
    theirs = cls([each for each in full.parameters() if each.requires_grad], lr=1e-3)
    ours = shardwise.build_optimizer(model, cls, lr=1e-3)
    for _ in range(2):
        full(**batch).loss.backward()
        shardwise.TrainStep(model, mesh)(batch)  # the same rows on both: Muon rounds gradients to bfloat16
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    found = shardwise.full_state_dict(model)
    return max(float((found[key] - value).abs().max()) for key, value in full.state_dict().items())


@pytest.mark.spawn
@pytest.mark.parametrize(("layout", "name"), [("ddp2", "Muon"), ("ddp2", "Adafactor")])
def test_what_is_not_elementwise_updates_parameters_in_one_piece(on_ranks, layout, name):
    assert max(on_ranks(update_copies)) < 1e-5


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_elementwise_optimizers_update_parts_as_they_would_the_whole(layout):
    for rank in spawn(update, 2, layout):
        assert len(rank) >= len(CLASSES) - 1
        # Rprop takes the sign of differences, which rounding decides where a gradient is zero.
        assert {name: error for name, error in rank.items() if error > (3e-3 if name == "Rprop" else 1e-5)} == {}


def state_dicts(mesh):
    """What optimizers' state dicts come to, before and after a step."""
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
    said = []
    for optimizer in (shardwise.build_optimizer(model, torch.optim.AdamW), torch.optim.SGD(model.parameters(), lr=0.1)):
        assert not optimizer.state_dict()["state"]
        model(**tiny_batch(model)).loss.backward()
        optimizer.step()
        optimizer.step()
        try:
            said.append(len(optimizer.state_dict()["state"]))
        except UnsupportedError as error:
            said.append(str(error))
    return said


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_the_state_of_parts_is_not_handed_out_as_that_of_full_parameters(on_ranks, layout):
    for adam, sgd in on_ranks(state_dicts):
        if layout == "tp2":
            assert "AdamW over parameters that are split over tp" in adam and "SGD" in sgd and "optimizer.state" in sgd
        else:
            assert (adam, sgd) == (12, 0), "DTensors say themselves what they are"
