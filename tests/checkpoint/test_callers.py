"""Who else calls these functions, and in which order: odd values, ranks that disagree, several models at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.errors import ConfigError, LayoutError, LoadError, ShardwiseError, UnsupportedError
from shardwise.parameters.registry import local_part
from shardwise.ranks.spawn import spawn
from shardwise.weights.locate import describe_kind
from tests.checkpoint.training import Training, differing

pytestmark = pytest.mark.single


@pytest.fixture(scope="module")
def training():
    return Training(shardwise.Mesh.open("tp1"), "llama")


def test_saved_before_the_first_step_and_in_eval_mode(training, tmp_path):
    """It loads, twice, into one whose optimizer has states already, and both go on alike."""
    training.model.eval()
    training.save(tmp_path / "ünï 数", extra={"step": 0})
    training.model.train()
    other = Training(shardwise.Mesh.open("tp1"), "llama", lost=True)
    other.steps(2)
    for _ in range(2):
        assert other.load(tmp_path / "ünï 数") == {"step": 0}
    assert not differing(other.whole(), training.whole())
    assert other.steps(2) == training.steps(2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_last": True}, "keep_last is True"),
        ({"optimizer": "AdamW"}, "the optimizer is a str"),
        ({"scheduler": object()}, "the scheduler is a object, which has no state_dict"),
        ({"extra": {"t": torch.ones(2).to_sparse()}}, r"extra.t is a Tensor of torch.float32 and layout torch.sparse"),
        ({"extra": torch.empty(2, device="meta")}, "extra is a Tensor .* on meta"),
        ({"extra": {"f": print}}, "extra.f is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_saved_is_named(training, tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        training.save(tmp_path, **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, b"bytes", 3])
def test_what_cannot_be_a_path_is_named(training, path):
    with pytest.raises(ConfigError, match="cannot be the path of checkpoints"):
        training.save(path)
    with pytest.raises(ConfigError, match="cannot be the path of checkpoints"):
        training.load(path)


def test_everything_that_extra_takes_comes_back(training, tmp_path):
    extra = {
        "tensors": [torch.arange(6).view(2, 3).t(), torch.ones(2, dtype=torch.bfloat16), torch.empty(0)],
        "step": 10**200,  # no name of a directory
        "flags": (torch.tensor(True), {1, 2}, None),
        (1, "two"): {3: float("inf"), "$": "x"},
        "text": "\ud800 数",
        "\udc80": torch.zeros(1),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    training.save(tmp_path, extra=extra)
    found = shardwise.load_checkpoint(tmp_path)
    names = ("\udc80", "conjugate", "negative")
    here, there = ((*each.pop("tensors"), *(each.pop(name) for name in names)) for each in (found, extra))
    for one, other in zip(here, there, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert found == extra


def test_keys_with_dots_are_others_than_those_of_dictionaries_inside(training, tmp_path):
    training.save(tmp_path, extra={"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    found = shardwise.load_checkpoint(tmp_path)
    assert found["a.b"] == 1
    assert found["a"]["b"] == 0


def test_saved_and_loaded_in_inference_mode(training, tmp_path):
    other = Training(shardwise.Mesh.open("tp1"), "llama", lost=True)
    with torch.inference_mode():
        for tag in ("a", "b"):
            training.save(tmp_path, tag=tag, async_save=True).wait()
        other.load(tmp_path)
    assert other.steps(2) == training.steps(2)
    training.save(tmp_path, tag="c", async_save=True).wait()


def test_options_that_are_tensors_come_back(training, tmp_path):
    options = {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.5), torch.tensor(0.75)), "capturable": False}
    first, second = (torch.optim.Adam(training.model.parameters(), **options, foreach=False) for _ in range(2))
    training.save(tmp_path, optimizer=first, scheduler=None)
    second.param_groups[0].update(lr=torch.tensor(0.0), betas=(torch.tensor(0.0), 0.0))
    training.load(tmp_path, optimizer=second, scheduler=None)
    group = second.param_groups[0]
    assert (float(group["lr"]), float(group["betas"][0]), group["betas"][1]) == (0.5, 0.5, 0.75)
    assert isinstance(group["lr"], torch.Tensor)


def test_what_is_no_checkpoint_is_not_replaced_by_one(training, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    with pytest.raises(LoadError, match=r"mine is there already, and is no checkpoint[\s\S]*holds notes"):
        training.save(tmp_path, tag="mine")
    assert (tmp_path / "mine" / "notes").read_text() == "precious"


def test_a_directory_that_was_deleted_is_locked_again(training, tmp_path):
    for _ in range(2):
        training.save(tmp_path / "all", tag="a")
        assert (tmp_path / "all" / ".lock").exists()
        shutil.rmtree(tmp_path / "all")


@pytest.mark.parametrize("call", [shardwise.save_checkpoint, shardwise.load_checkpoint])
def test_what_is_no_model_is_named(tmp_path, call):
    with pytest.raises(LayoutError, match="str is not a model that Shardwise has split"):
        call(tmp_path, model="llama")


def test_another_optimizer_than_the_models_is_refused(training, tmp_path):
    training.save(tmp_path)
    stray = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match=r"a parameter of shape \(2, 2\) that is not the model's"):
        shardwise.load_checkpoint(tmp_path, model=training.model, optimizer=stray)


def test_a_relative_path_is_meant_when_it_is_given(training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pending = training.save("there", tag="a", async_save=True)
    Path("below").mkdir()
    os.chdir("below")
    assert pending.wait() == "a"
    assert (tmp_path / "there" / "a" / "manifest.json").exists()


def test_a_home_directory_is_meant_by_its_sign(training, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    training.save("~/there", tag="a")
    training.load("~/there")
    assert (tmp_path / "there" / "a").is_dir()
    for url in ("s3://bucket/there", Path("s3://bucket/there")):
        with pytest.raises(ConfigError, match="cannot be the path of checkpoints"):
            training.save(url)


class Wrapper(torch.nn.Module):
    """A head and a buffer beside the split model."""

    def __init__(self, model, name="head"):
        super().__init__()
        self.inner = model
        self.add_module(name, torch.nn.Linear(2, 2, bias=False))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_what_lies_beside_the_split_model_is_saved_with_it(training, tmp_path):
    here, there = Wrapper(training.model), Wrapper(Training(shardwise.Mesh.open("tp1"), "llama", lost=True).model)
    here.seen += 3
    here.scratch += 3
    shardwise.save_checkpoint(tmp_path, model=here)
    shardwise.load_checkpoint(tmp_path, model=there)
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))
    assert there.seen.tolist() == [3, 3]
    assert there.scratch.tolist() == [0, 0]
    with pytest.raises(UnsupportedError, match=r"lm_head.weight is of the split model, and of the module around it"):
        shardwise.save_checkpoint(tmp_path, model=Wrapper(training.model, "lm_head"))


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_what_was_trained_and_is_frozen_now_is_saved(tmp_path, with_optimizer):
    """By a new optimizer of the head alone, which holds no states of what was trained before; or without one."""
    here = Training(shardwise.Mesh.open("tp1"), "llama")
    here.steps(1)
    for name, parameter in here.model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    optimizer = torch.optim.AdamW(here.model.lm_head.parameters()) if with_optimizer else None
    here.save(tmp_path, tag="a", optimizer=optimizer, scheduler=None)
    there = Training(shardwise.Mesh.open("tp1"), "llama", lost=True)
    there.load(tmp_path, optimizer=None, scheduler=None)
    assert not differing(shardwise.full_state_dict(there.model), shardwise.full_state_dict(here.model))


def test_two_models_save_to_one_directory_at_once(training, tmp_path):
    """Each on a mesh of its own: neither takes what the other writes for what a crash has left."""
    other = Training(shardwise.Mesh.open("tp1"), "qwen3")
    saves = [
        each.save(tmp_path, tag=f"{name}-{number}", async_save=True)
        for number in range(4)
        for name, each in (("a", training), ("b", other))
    ]
    assert {save.wait() for save in saves} == {f"{name}-{number}" for number in range(4) for name in "ab"}
    other.load(tmp_path, "b-2")
    assert shardwise.load_checkpoint(tmp_path) is None


def test_a_load_without_a_model_waits_for_the_save_under_way(training, tmp_path):
    for step in (1, 2, 3):
        training.save(tmp_path, extra={"step": step}, async_save=True, keep_last=1)
        assert shardwise.load_checkpoint(tmp_path) == {"step": step}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["step-1/manifest.json"], None),
        (["manifest.json"], "one checkpoint, not the directory"),
        (["config.json", "model.safetensors"], "a Hugging Face model directory"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter of PEFT"),
        (["model/.metadata"], r"\(DCP\)"),
        ([".metadata", "__0_0.distcp"], r"\(DCP\)"),
        (["shards/mp_metadata_pp_rank_0.pt", "shards/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"], "Optimum Neuron"),
        (["tag/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"], "neuronx_distributed"),
        (["tp_rank_00_pp_rank_00/checkpoint.pt"], "neuronx_distributed"),
        (["global_step1/mp_rank_00_model_states.pt"], "DeepSpeed"),
        (["latest_checkpointed_iteration.txt"], "Megatron-LM"),
    ],
)
def test_a_directory_of_another_kind_is_named(tmp_path, files, says):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if says is None:
        assert "why" not in describe_kind(tmp_path)
        return
    with pytest.raises(LoadError, match=f"there is no complete checkpoint[\\s\\S]*it is .*{says}"):
        shardwise.load_checkpoint(tmp_path)


DISAGREEMENTS = {
    "keep_last is 0": lambda rank: {"keep_last": rank},
    "cannot be the path": lambda rank: {"path": None if rank else "x"},
    "extra.f is a function": lambda rank: {"extra": {"f": differing} if rank else None},
    "the optimizer is a int": lambda rank: {"optimizer": rank or None},
    "at:  ": lambda rank: {"extra": {"step": rank}},
    "at:  extra.seen": lambda rank: {"extra": {"seen": torch.tensor([rank])}},
    "at:  scheduler": lambda rank: {} if rank else {"scheduler": None},
    "at:  tag": lambda rank: {"tag": f"a{rank}"},
    "at:  async_save": lambda rank: {"tag": "a", "async_save": bool(rank)},
}


def disagree(base):
    with shardwise.Mesh.open("tp2") as mesh:
        training = Training(mesh, "llama")
        says = r"at:  the call[\s\S]*0: save_checkpoint[\s\S]*1: load_checkpoint"
        with pytest.raises(ConfigError, match=says):
            training.load(base) if mesh.rank else training.save(base)
        training.save(base, tag="first")  # ranks remember what they have agreed on
        found = []
        for differs in DISAGREEMENTS.values():
            options = {"path": base, **differs(mesh.rank)}
            if isinstance(options["path"], str):
                options["path"] = base / "x"
            try:
                found.append(training.save(options.pop("path"), **options).wait())
            except ConfigError as error:
                found.append(str(error))
        loads = [("first", base), ("none" if mesh.rank else "first", base), ("first", None if mesh.rank else base)]
        for tag, path in loads:
            try:
                found.append(training.load(path, tag))
            except ConfigError as error:
                found.append(str(error))
        for part in ("optimizer", "scheduler"):
            differs = f"do not call load_checkpoint alike\\n +at:  the {part}[\\s\\S]*rank 1: none"
            with pytest.raises(ConfigError, match=differs):
                training.load(base, "first", **({part: None} if mesh.rank else {}))
        with pytest.raises(ConfigError, match=says):
            training.load(base) if mesh.rank else training.save(base, tag="b")
        says = r"the call[\s\S]*rank 0: a forward or a step[\s\S]*rank 1: load_checkpoint"
        with pytest.raises(ShardwiseError, match=says):
            training.load(base) if mesh.rank else training.steps(1)
        return found


def drift(base, layouts):
    """Every fault is told by the first save of a division, and by one after it; equal copies are saved."""
    for layout in layouts:
        with shardwise.Mesh.open(layout) as mesh:
            training = Training(mesh, "llama-1kv")
            training.steps(1)
            norm = next(value for name, value in training.model.named_parameters() if name.endswith("norm.weight"))
            for number, state in enumerate((None, "exp_avg", None)):
                value = local_part(training.optimizer.state[norm][state] if state else norm).detach()
                kept = value.clone()
                value.view(-1)[-1:] += mesh.position * 1e-6
                name = r"the optimizer's exp_avg of \S*norm.weight" if state else r"\S*norm.weight"
                with pytest.raises(LayoutError, match=f"(?m)the ranks hold different copies of {name}"):
                    training.save(base / layout, tag=f"{number}")
                value.copy_(kept)
                training.save(base / layout, tag=f"{number}", async_save=True).wait()


@pytest.mark.parametrize("layouts", [("tp2", "ddp2"), ("ddp2.fsdp2", "fsdp2.tp2", "pp2.tp2")])
def test_copies_that_have_drifted_apart_are_not_saved(tmp_path, layouts):
    spawn(drift, 4 if "." in layouts[0] else 2, tmp_path, layouts)


@pytest.mark.spawn
def test_ranks_that_disagree_end_in_one_error_on_all(tmp_path):
    first, second = spawn(disagree, 2, tmp_path)
    assert first == second
    *errors, loaded, of_rank_0, no_path = first
    for error, says in zip(errors, DISAGREEMENTS, strict=True):
        assert says in error
    assert loaded is None
    assert of_rank_0 is None
    assert "cannot be the path" in no_path
