"""Files that must fail: each with one clear error, and nothing changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.checkpoint import manifest as manifests
from shardwise.errors import ConfigError, LoadError
from shardwise.parallel.build import read_config
from shardwise.ranks.spawn import spawn
from tests.checkpoint.training import Training, differing
from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.single

TENSORS = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def training():
    trained = Training(shardwise.Mesh.open("tp1"), "llama")
    trained.steps(2)
    return trained


@pytest.fixture(scope="module")
def saved(training, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    training.save(root, extra={"step": 2, "loader": {"place": 7}})
    training.steps(1)  # so that what is loaded is not what is there
    return root


@pytest.fixture
def root(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def change(root, name, **values):
    """Changes entries of a JSON file, and its checksums with them, as somebody would who means to."""
    path = root / "step-2" / name
    data = {**json.loads(path.read_text()), **values}
    if name == manifests.MANIFEST:
        data["crc"] = manifests._own_crc(data)
    path.write_text(json.dumps(data))
    if name == manifests.INDEX:
        files = json.loads((root / "step-2" / manifests.MANIFEST).read_text())["files"]
        files[name] = [path.stat().st_size, zlib.crc32(path.read_bytes())]
        change(root, manifests.MANIFEST, files=files)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def tensors_of(root):
    return json.loads((root / "step-2" / manifests.INDEX).read_text())["tensors"]


def gap(root):
    tensors = tensors_of(root)
    part = tensors["model/model.norm.weight"]["parts"][0]
    tensors["model/model.norm.weight"]["parts"] = [[*part[:2], [[0, 32]]]] * 2
    change(root, manifests.INDEX, tensors=tensors)


DAMAGE = {
    "a byte of a tensor": (lambda root: flip(root / "step-2" / TENSORS, -1), rf"\[.*\] is damaged[\s\S]*{TENSORS}"),
    "a byte of a header": (lambda root: flip(root / "step-2" / TENSORS, 40), f"header of {TENSORS} is damaged"),
    "a byte of the index": (lambda root: flip(root / "step-2" / "tensors.json", 99), "tensors.json is damaged"),
    "a byte of the manifest": (lambda root: flip(root / "step-2" / "manifest.json", 80), "manifest"),
    "a byte of the configuration": (lambda root: flip(root / "step-2" / "config.json", 9), "config.json is damaged"),
    "cut short": (lambda root: os.truncate(root / "step-2" / TENSORS, 5000), f"{TENSORS} has 5,000 bytes of [0-9,]*"),
    "an index cut short": (
        lambda root: os.truncate(root / "step-2" / "tensors.json", 50),
        "tensors.json has 50 bytes of",
    ),
    "an empty manifest": (lambda root: os.truncate(root / "step-2" / "manifest.json", 0), "manifest.json is damaged"),
    "a missing file": (lambda root: (root / "step-2" / TENSORS).unlink(), f"lacks {TENSORS}"),
    "from the future": (lambda root: change(root, "manifest.json", version=2), "version 2 of the format"),
    "another format": (lambda root: change(root, "manifest.json", format="x"), "not the manifest of a checkpoint"),
    "a list": (lambda root: (root / "step-2" / "manifest.json").write_text("[]"), "not the manifest of a checkpoint"),
    "a gap": (gap, "model.norm.weight is not complete"),
    "nothing": (lambda root: shutil.rmtree(root / "step-2"), "there is no complete checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_changes_nothing(training, root, damage):
    do, says = DAMAGE[damage]
    do(root)
    before = training.whole()
    with pytest.raises(LoadError, match=says) as found:
        training.load(root)
    assert str(root) in str(found.value)
    assert not differing(training.whole(), before)


def linked(root):
    """A shard that is stored elsewhere, and a link to it."""
    (root / "step-2" / TENSORS).rename(root.parent / "elsewhere")
    (root / "step-2" / TENSORS).symlink_to(root.parent / "elsewhere")


def test_a_checkpoint_that_was_not_damaged_loads(training, root):
    before = training.whole()
    linked(root)
    assert training.load(root) == {"step": 2, "loader": {"place": 7}}
    assert differing(training.whole(), before)
    training.steps(1)


@pytest.mark.parametrize("tag", ["../step-2", "/etc", ".hidden", "", "a" * 101, "latest", "a/b", "a\0b"])
def test_tags_stay_in_their_directory(training, root, tag):
    with pytest.raises(ConfigError, match="cannot be the tag"):
        training.save(root, tag=tag)
    with pytest.raises(ConfigError, match="cannot be the tag"):
        training.load(root, tag)


def test_a_tag_that_is_not_there_is_named_with_those_that_are(training, root):
    with pytest.raises(LoadError, match=r"no checkpoint 'step-3' \(did you mean 'step-2'\?\)"):
        training.load(root, "step-3")


@pytest.mark.parametrize("place", ["", "step-2"])
def test_a_checkpoint_is_neither_a_model_nor_an_adapter(training, root, place):
    says = r"own checkpoints[\s\S]*shardwise.load_checkpoint[\s\S]*shardwise convert .*--to hf OUT"
    for options in ({"source": root / place}, {"source": training.model.config, "adapter": root / place}):
        with pytest.raises(LoadError, match=says):
            shardwise.load(**options, mesh=shardwise.Mesh.open("tp1"))
    if not place:  # the config of one is that of its model
        with pytest.raises(LoadError, match=says):
            read_config(root, {})


def test_what_would_have_to_be_pickled_is_refused(training, root):
    with pytest.raises(ConfigError, match="extra.loader is a object"):
        training.save(root, extra={"loader": object()})
    assert [path.name for path in root.iterdir() if path.name.startswith(".step")] == []


def test_another_model_is_refused_by_name(root):
    other = Training(shardwise.Mesh.open("tp1"), "llama", model={"num_hidden_layers": 1})
    with pytest.raises(LoadError, match=r"unexpected: model.layers.1.*"):
        other.load(root)
    other = Training(shardwise.Mesh.open("tp1"), "llama", model={"num_hidden_layers": 3})
    with pytest.raises(LoadError, match=r"missing: model.layers.2.*"):
        other.load(root)
    assert other.load(root, strict=False)["step"] == 2
    other = Training(shardwise.Mesh.open("tp1"), "llama", model={"intermediate_size": 80})
    with pytest.raises(LoadError, match=r"\[96, 64\] in the checkpoint, \[80, 64\] in the model"):
        other.load(root, strict=False)


def test_another_optimizer_or_schedule_is_refused_by_name(root):
    other = Training(shardwise.Mesh.open("tp1"), "llama", "sgd")
    with pytest.raises(LoadError, match="the state of torch.optim.adamw.AdamW, the optimizer is torch.optim.sgd.SGD"):
        other.load(root)
    other = Training(shardwise.Mesh.open("tp1"), "llama")
    other.schedule = torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    with pytest.raises(LoadError, match="no state of a StepLR: that of a MultiStepLR"):
        other.load(root)


def test_another_job_that_saves_there_is_refused(training, root):
    code = (
        "import sys, time; from pathlib import Path; from shardwise.checkpoint.store import lock;"
        f"lock(Path({str(root)!r})); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        says = (
            rf"process {other.pid} on .* saves its checkpoints in[\s\S]*if that process no longer runs.*delete .*\.lock"
        )
        with pytest.raises(LoadError, match=says):
            training.save(root)
        other.kill()
        other.wait()
    training.save(root, tag="mine")


def test_a_place_that_cannot_be_written_is_named(training, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="the checkpoint cannot be written"):
        training.save(tmp_path / "file" / "below")


def load_all_on_ranks(base):
    """What loading each damaged copy says, and whether any of them changed anything."""
    with shardwise.Mesh.open("tp2") as mesh:
        training = Training(mesh, "llama")
        training.steps(1)
        before, found = training.whole(), {}
        for path in sorted(base.iterdir()):
            with pytest.raises(LoadError) as error:
                training.load(path / "saved")
            found[path.name] = str(error.value)
        return found, not differing(training.whole(), before)


@pytest.mark.spawn
def test_every_damage_is_one_error_on_every_rank(saved, tmp_path):
    damage = dict([*DAMAGE.items()][:: 1 if FULL_PRODUCT else 3])  # one rank finds them all above
    for number, (do, _) in enumerate(damage.values()):
        own = tmp_path / f"{number:02d}"  # some leave files beside their directory
        do(Path(shutil.copytree(saved, own / "saved")))
    first, second = spawn(load_all_on_ranks, 2, tmp_path)
    assert first == second
    found, is_same = first
    for (name, (_, says)), error in zip(damage.items(), found.values(), strict=True):
        assert re.search(says, error), (name, error)
    assert is_same


def load_on_ranks(root):
    with shardwise.Mesh.open("tp2") as mesh:
        training = Training(mesh, "llama")
        before = training.whole()
        own = root / f"{mesh.rank}"
        try:
            shardwise.load_checkpoint(own if (root / "0").exists() else root, model=training.model)
        except LoadError as error:
            return str(error), not differing(training.whole(), before)
        return None


@pytest.mark.spawn
def test_one_ranks_fault_is_every_ranks_error(root, tmp_path):
    flip(root / "step-2" / TENSORS, -1)
    (first, same), (second, also_same) = spawn(load_on_ranks, 2, root)
    assert first == second
    assert "is damaged" in first
    assert same
    assert also_same
    shutil.copytree(root, tmp_path / "own" / "0")
    (first, same), (second, also_same) = spawn(load_on_ranks, 2, tmp_path / "own")
    assert first == second
    assert same
    assert also_same
