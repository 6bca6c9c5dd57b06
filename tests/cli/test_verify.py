"""`shardwise verify` proves a split, and its exit code says whether it holds."""

from __future__ import annotations

import json
import types

import pytest
import transformers
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import shardwise
from shardwise import FsdpPolicy, Precision, Recompute
from shardwise.api import verifying as api
from shardwise.cli.main import main
from shardwise.errors import ConfigError
from tests.cli.test_train import MODEL
from tests.families import tiny_model

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


def test_a_wrong_split_fails(config, tmp_path, capsys, monkeypatch):
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
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"model": {"path": str(tmp_path)}, "data": {"path": str(tmp_path)}}))
    assert main(["verify", str(run), "layout=pp2", "--sequence-parallel", "num_microbatches=4"]) == 1
    assert (seen[1].layout, seen[1].num_microbatches) == ("pp2", 4)


LLAMA = tiny_model("llama").config


def test_a_narrow_run_is_held_to_float32_beside_the_unsplit_model_in_that_dtype():
    report = shardwise.verify(
        LLAMA,
        "fsdp2",
        precision=Precision(),
        recompute=Recompute(mode="full"),
        fsdp=FsdpPolicy(zero_stage=2),
        num_microbatches=2,
    )
    assert report.passed, str(report)
    narrow = report.measurements[0].narrow
    assert narrow.name == "bfloat16" and 1e-3 < narrow.error < narrow.allowed
    assert "in bfloat16" in str(report) and "relative to their norm" in str(report)


def test_parameters_in_a_narrow_dtype_are_tried_in_it():
    report = shardwise.verify(LLAMA, "tp2", dtype="bfloat16")
    assert report.passed and report.measurements[0].narrow.name == "bfloat16"


def test_the_ranks_run_what_was_asked_for():
    with pytest.raises(ConfigError, match="fits no module|matches no"):
        shardwise.verify(LLAMA, "tp2", recompute=Recompute(mode="full", modules=("model.layers.*.mpl",)))


def test_options_that_do_not_exist_are_errors():
    with pytest.raises(ConfigError, match="sequence_paralel"):
        shardwise.verify(LLAMA, "tp2", sequence_paralel=True)
    with pytest.raises(ConfigError, match="no option recomput"):
        shardwise.verify(transformers.LlamaForCausalLM(LLAMA), "tp2", recomput=None)


def test_a_pipeline_is_proved_with_layers_that_run():
    config = MllamaTextConfig(num_hidden_layers=4, cross_attention_layers=[1, 3])  # without images two of them run
    report = shardwise.verify(config, "pp2", auto_class=transformers.MllamaForCausalLM)
    assert report.passed, str(report)
