"""`shardwise verify` proves a split, and its exit code says whether it holds."""

from __future__ import annotations

import json
import types

import pytest

from shardwise.api import verifying as api
from shardwise.cli.main import main
from tests.cli.test_train import MODEL

pytestmark = pytest.mark.spawn


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MODEL, "vocab_size": 65}))
    return str(path)


def test_a_right_split_passes_with_a_table(config, capsys):
    assert main(["verify", config, "--layout", "tp2", "--sequence-parallel"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("loss", "logits", "gradient"))


def test_a_layout_that_does_not_fit_is_refused_before_ranks_start(config, capsys, monkeypatch):
    monkeypatch.setattr(api, "spawn", None)
    assert main(["verify", config, "--layout", "tp64"]) == 1
    assert "over tp=64" in capsys.readouterr().err


def test_a_wrong_split_fails(config, capsys, monkeypatch):
    seen = []

    class Report:
        passed = False

        def __str__(self):
            return "the table"

    def verify(model, layout, **options):
        seen.append(types.SimpleNamespace(model=model, layout=str(layout), **options))
        return Report()

    monkeypatch.setattr(api, "verify", verify)
    assert main(["verify", config, "--layout", "tp2"]) == 1
    assert "the table" in capsys.readouterr().out
    assert seen[0].layout == "tp2" and seen[0].plan == "auto" and seen[0].model.model_type == "llama"
