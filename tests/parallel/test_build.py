"""Configs and directories that cannot be read: one error that names them, and no wait."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise
from shardwise.errors import LoadError
from shardwise.parallel.build import read_config
from shardwise.probe.disk_cache import read
from shardwise.weights.locate import check_no_checkpoint, kind_of
from tests.families import tiny_model

pytestmark = pytest.mark.single


def refuse(*args, **options):
    raise PermissionError(13, "Permission denied", str(args[0]))


@pytest.fixture
def directory(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.mkdir, "cannot read the model config"),
        (lambda path: path.symlink_to(path.name), "cannot read the model config"),
        (lambda path: path.write_text("{"), "cannot read the model config[\\s\\S]*not a valid JSON"),
        (lambda path: path.write_text("[]"), "cannot read the model config"),
        (lambda path: None, "cannot read the model config[\\s\\S]*config.json"),
    ],
    ids=["a directory", "a link to itself", "no JSON", "a list", "nothing"],
)
def test_a_config_that_is_none(directory, damage, says):
    (directory / "config.json").unlink()
    damage(directory / "config.json")
    with pytest.raises(LoadError, match=says):
        read_config(directory, {})


def test_what_another_user_owns_is_named(directory, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(Path, "glob", refuse)
    for look in (check_no_checkpoint, kind_of):
        with pytest.raises(LoadError, match=f"cannot read {directory}[\\s\\S]*Permission denied"):
            look(directory)
    assert read(tmp_path / "plan.json", dict) is None, "what was found out before is found out again"


def test_a_damaged_generation_config_is_not_taken_for_none(directory):
    path = directory / "generation_config.json"
    for damage in (lambda: path.write_text("{"), lambda: path.symlink_to(path.name)):
        path.unlink()
        damage()
        with pytest.raises(LoadError, match=r"cannot read the generation_config.json of"):
            shardwise.load(directory, shardwise.Mesh.open("tp1"))
    path.unlink()
    shardwise.load(directory, shardwise.Mesh.open("tp1"))
