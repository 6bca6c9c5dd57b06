"""Ranks that hold some layers, and models of which some parameters are trained: saved and loaded as any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

import shardwise
from shardwise.checkpoint.manifest import read_manifest
from shardwise.errors import ConfigError, LoadError
from shardwise.parameters.registry import note_source, registry_of
from shardwise.ranks.spawn import spawn
from shardwise.topology.shape import MeshShape
from tests.families import rows_of, tiny_batch, tiny_model

pytestmark = [pytest.mark.spawn, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]

ROWS = 8


def build(mesh, *, tied=False, adapted=False, lost=False, source=""):
    """A model, its optimizer, and a function that trains them for some steps and returns the losses."""
    model = tiny_model("llama", tied=tied)
    model.name_or_path = source
    batch = tiny_batch(model, rows=ROWS)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    for parameter in model.parameters() if lost else ():
        if parameter.requires_grad:
            parameter.data.mul_(1.5)
    shardwise.parallelize(model, mesh)
    if source:  # as where Shardwise has read the weights from there itself
        adapters = {name for name, _ in registry_of(model).entries.items() if "lora_" in name}
        note_source(model, registry_of(model), drawn=adapters)
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-6)
    step = shardwise.TrainStep(model, mesh, num_microbatches=2)

    def train(number):
        losses = []
        for _ in range(number):
            losses.append(float(step(rows_of(batch, mesh)).loss))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return model, optimizer, train


def go_on(layout, base, tied=False, adapted=False):
    """Goes on with what one process saved, and saves what comes of it."""
    case = f"{tied}-{adapted}"
    with shardwise.Mesh.open(layout) as mesh:
        return _go_on(mesh, base, case, tied=tied, adapted=adapted)


def _go_on(mesh, base, case, *, tied, adapted):
    model, optimizer, train = build(mesh, tied=tied, adapted=adapted, lost=True)
    shardwise.load_checkpoint(f"{base}/start-{case}", model=model, optimizer=optimizer)
    losses = train(2)
    shardwise.save_checkpoint(f"{base}/{mesh.shape}-{case}", model=model, optimizer=optimizer, extra={"step": 4})
    return losses, shardwise.full_state_dict(model), train(2)


def check(base, layout, **case):
    mesh, name = shardwise.Mesh.open("tp1"), "-".join(str(case.get(key, False)) for key in ("tied", "adapted"))
    model, optimizer, train = build(mesh, **case)
    train(2)
    shardwise.save_checkpoint(base / f"start-{name}", model=model, optimizer=optimizer, extra={"step": 2})
    expected = train(2)
    ranks = spawn(go_on, MeshShape.parse(layout).world_size, layout, str(base), **case)
    for losses, _, _ in ranks:
        assert losses == pytest.approx(expected, abs=1e-5)
    _, full, next_losses = ranks[0]
    model, optimizer, train = build(mesh, lost=True, **case)
    shardwise.load_checkpoint(base / f"{layout}-{name}", model=model, optimizer=optimizer)
    found = shardwise.full_state_dict(model)
    assert found.keys() == full.keys()
    assert all(torch.equal(value, full[name]) for name, value in found.items())
    assert train(2) == pytest.approx(next_losses, abs=1e-5)


@pytest.mark.parametrize(("layout", "tied"), [("pp2", True), ("pp2.tp2", False), ("pp2.fsdp2", True)])
def test_stages_save_and_load_what_they_hold(tmp_path, layout, tied):
    check(tmp_path, layout, tied=tied)


def train_adapters(base, layouts):
    """Saves in the first layout, and goes on in each: the losses; and what is said of another base."""
    found = {}
    for layout in layouts:
        with shardwise.Mesh.open(layout) as mesh:
            model, optimizer, train = build(mesh, adapted=True, lost=bool(found), source="the/base")
            if not found:
                train(2)
                shardwise.save_checkpoint(base, model=model, optimizer=optimizer, extra={"step": 2})
            else:
                shardwise.load_checkpoint(base, model=model, optimizer=optimizer)
            found[layout] = train(2)
            shardwise.save_checkpoint(f"{base}/{layout}", model=model, optimizer=optimizer, tag="a")
            assert read_manifest(Path(base, layout, "a")).content == "trained", layout
            with torch.no_grad():
                for parameter in [each for each in model.parameters() if not each.requires_grad][:1]:
                    parameter.mul_(-1)
            with pytest.raises(LoadError) as raised:
                shardwise.load_checkpoint(base, model=model, optimizer=optimizer)
            assert "was trained on another base than this model's" in str(raised.value)
            assert "have changed since they were read: model.embed_tokens.weight" in str(raised.value)
            shardwise.load_checkpoint(base, model=model, optimizer=optimizer, strict=False)
    return found


def test_adapters_are_saved_without_the_base_which_must_be_the_same(tmp_path):
    layouts = ("tp2", "fsdp2", "pp2")
    for found in spawn(train_adapters, 2, str(tmp_path), layouts):
        for layout in layouts:
            assert found[layout] == pytest.approx(found["tp2"], abs=1e-5)
    mesh = shardwise.Mesh.open("tp1")
    model, optimizer, train = build(mesh, adapted=True, lost=True)
    shardwise.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert train(2) == pytest.approx(found["tp2"], abs=1e-5)
    directory = tmp_path / "step-2"
    assert json.loads((directory / "manifest.json").read_text())["content"] == "trained"
    assert all("lora_" in key for key in json.loads((directory / "tensors.json").read_text())["tensors"]
               if key.startswith("model/"))  # fmt: skip
    plain, _, _ = build(mesh)
    with pytest.raises(LoadError, match=r"missing: model.embed_tokens.weight.*\n.*unexpected: .*lora_A"):
        shardwise.load_checkpoint(tmp_path, model=plain)
    model.merge_adapter()
    with pytest.raises(ConfigError, match="has its adapters merged into its weight"):
        shardwise.save_checkpoint(tmp_path, model=model, optimizer=optimizer)


@pytest.mark.parametrize("source", ["", "the/base"])
def test_frozen_weights_under_adapters_are_saved_where_nothing_has_them(tmp_path, source):
    """Where no one knows what they were read from; and those that were trained and are frozen again."""
    mesh = shardwise.Mesh.open("tp1")
    model, _, _ = build(mesh, adapted=True, source=source)
    embedding = next(value for name, value in model.named_parameters() if "embed_tokens" in name)
    embedding.requires_grad_(True)
    model(input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss.backward()
    torch.optim.SGD([embedding], lr=0.1).step()
    embedding.requires_grad_(False)
    adapters = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    shardwise.save_checkpoint(tmp_path, model=model, optimizer=adapters, tag="a")
    saved = json.loads((tmp_path / "a" / "tensors.json").read_text())["tensors"]
    base = {key for key in saved if key.startswith("model/") and "lora_" not in key}
    assert base == (
        {"model/model.embed_tokens.weight"} if source else {f"model/{name}" for name in names_of_base(model)}
    )
    other, _, _ = build(mesh, adapted=True, lost=True, source=source)
    shardwise.load_checkpoint(tmp_path, model=other)
    found, expected = shardwise.full_state_dict(other), shardwise.full_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def names_of_base(model):
    prefix = "base_model.model."
    return {name.removeprefix(prefix) for name, value in model.named_parameters() if not value.requires_grad}


@pytest.mark.parametrize("change", ["merged", "resized"])
def test_a_base_that_was_changed_after_it_was_read_is_saved_under_adapters(tmp_path, change):
    """transformers has read it, and Shardwise does not know what happened to it since."""
    mesh = shardwise.Mesh.open("tp1")
    tiny_model("llama").save_pretrained(tmp_path / "base")

    def adapted(*, changes):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        if change == "resized":
            model.resize_token_embeddings(model.config.vocab_size + 8)
        elif changes:
            config = LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
            model = get_peft_model(model, config).merge_and_unload()
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        return shardwise.parallelize(get_peft_model(model, config), mesh)

    here, there = adapted(changes=True), adapted(changes=False)
    shardwise.save_checkpoint(tmp_path / "run", model=here, tag="a")
    shardwise.load_checkpoint(tmp_path / "run", model=there)
    found, expected = shardwise.full_state_dict(there), shardwise.full_state_dict(here)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
