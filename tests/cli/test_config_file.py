"""A configuration is read as written, and everything wrong with it is said at once."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shardwise.cli.config_file import build_config, config_reference, dump_config, parse_config, read_config
from shardwise.errors import ConfigError, LoadError
from shardwise.train.run_config import TrainConfig, num_microbatches_of

pytestmark = pytest.mark.pure

GOOD = """
model: {path: some/model}
data: {path: corpus, include: ["**/*.py"]}
layout: tp2
optimizer: {lr: 3e-4, options: {betas: [0.9, 0.95]}, schedule: {name: linear, warmup_steps: 5}}
"""


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def problems_of(tmp_path, text, *overrides):
    _, problems = parse_config(write(tmp_path, text), overrides)
    return {problem.key: str(problem) for problem in problems}


def test_a_file_with_overrides_becomes_values_of_the_right_types(tmp_path):
    config = read_config(write(tmp_path, GOOD), ["optimizer.lr=1e-3", "steps=7", "export=out", "data.seq_length=64"])
    assert config.optimizer.lr == 1e-3 and config.optimizer.schedule.warmup_steps == 5
    assert (config.steps, config.export, config.layout, config.data.seq_length) == (7, "out", "tp2", 64)
    assert config.data.include == ("**/*.py",) and config.optimizer.options == {"betas": [0.9, 0.95]}
    assert config.optimizer.max_grad_norm == TrainConfig().optimizer.max_grad_norm


def test_places_may_be_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = read_config(write(tmp_path, GOOD), ["checkpoint.dir=~/saved", "export=~/out", "data.path=~/text"])
    assert (config.checkpoint.dir, config.export) == ("/home/me/saved", "/home/me/out")
    assert config.data.path == "/home/me/text" and config.model.path == "some/model"


def test_a_configuration_written_out_reads_back_equal(tmp_path):
    config = read_config(write(tmp_path, GOOD), ["optimizer.max_grad_norm=null"])
    assert config.optimizer.max_grad_norm is None
    assert read_config(write(tmp_path, dump_config(config))) == config


def test_every_problem_is_named_with_a_suggestion(tmp_path):
    text = """
    model: {path: some/model, dtype: float23}
    lr: 1
    data: {path: corpus, seq_lenght: 3, seq_length: true}
    log.dir: runs
    logs.dir: runs
    optimizer: {lr: fast, schedule: {name: cosin}, options: [1]}
    layout: tq2
    steps: 0
    """
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, ["layout.x=1", "oops"])
    message = str(caught.value)
    for part in (
        "run.yaml has 13 problems",
        "lr: unknown key (there is optimizer.lr)",
        "data.seq_lenght: unknown key (did you mean 'seq_length'?)",
        "log.dir: unknown key",
        "logs.dir: unknown key",
        "data.seq_length: Input should be a valid integer, not True; expected: ",
        "optimizer.lr: Input should be a valid number, not 'fast'; expected: Peak learning rate",
        "schedule.name: Input should be 'constant', 'linear', 'cosine' or 'warmup_stable_decay', not 'cosin'",
        "optimizer.options: Input should be an object, not [1]",
        "model.dtype: Input should be 'float32' or 'bfloat16', not 'float23'",
        "layout: cannot read the layout 'tq2'",
        "steps: Input should be greater than 0, not 0; expected: Optimizer steps",
        "layout.x: cannot be set, because layout is 'tq2'",
        "oops: is not an override; write key=value",
    ):
        assert part in message, f"{part!r} is not in\n{message}"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimizer.warmup_steps", "there is optimizer.schedule.warmup_steps"),
        ("model.seq_length", "there is data.seq_length"),
        ("data.batch_size", "there is batch_size"),
        ("data.seq_lenght", "did you mean 'seq_length'?"),
        ("model.nonsense", None),
    ],
)
def test_an_unknown_key_is_answered_with_a_similar_one(tmp_path, key, meant):
    found = problems_of(tmp_path, GOOD, f"{key}=1")
    assert found == {key: f"{key}: unknown key" + (f" ({meant})" if meant else "")}


def test_a_misspelt_key_does_not_also_count_as_missing(tmp_path):
    assert problems_of(tmp_path, "model: {pth: x}\ndata: {path: a}").keys() == {"model.pth"}


@pytest.mark.parametrize(
    ("override", "key", "part"),
    [
        ("model.config={model_type: llama}", "model", "both are given"),
        ("data.path=null", "data", "neither is given"),
        ("data.subset=x", "data.subset", "has an effect only with"),
        ("data.split=test", "data.split", "has an effect only with"),
        ("export=''", "export", "String should have at least 1 character"),
        ("steps=2026-13-45", "steps", "a valid integer, not '2026-13-45'"),
        ("2026-01-01=1", "2026-01-01", "unknown key"),
        ("batch_size=9", "batch_size", "use a multiple of 4"),
        ("layout=tp1", "sequence_parallel", "needs at least 2 tp ranks"),
        ("layout=cp2.tp2", "layout", "cp is not supported yet"),
        ("pipeline.schedule=1f1b2", "pipeline", "configures the pp axis"),
        ("data.seq_length=1", "data.seq_length", "at least 2"),
        ("seed=-1", "seed", "greater than or equal to 0"),
        ("recompute=true", "recompute", "not True; expected: the keys mode, modules, budget"),
        ("device=gpu", "device", "not 'gpu'; expected: Where ranks compute"),
        ("evaluation.every=5", "evaluation.every", "nothing is held out"),
        (".seed=1", ".seed=1", "is not an override"),
        ("optimizer.lr=.inf", "optimizer.lr", "a finite number"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay", "greater than or equal to 0"),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm", "null leaves them"),
        ("optimizer.options.lr=1", "optimizer.options.lr", "it is optimizer.lr"),
        ("optimizer.schedule.warmup_steps=2000", "optimizer.schedule.warmup_steps", "0 and steps"),
        (
            "optimizer.schedule.final_ratio=2",
            "optimizer.schedule.final_ratio",
            "less than or equal to 1, not 2; expected: Learning rate at",
        ),
    ],
)
def test_values_that_make_no_sense_are_problems(tmp_path, override, key, part):
    text = f"{GOOD}\nsequence_parallel: true\nnum_microbatches: 4\n"
    assert problems_of(tmp_path, text) == {}
    found = problems_of(tmp_path, text, override)
    assert found.keys() == {key} and part in found[key]


def test_new_models_need_a_type_and_a_tokenizer():
    _, problems = build_config({"model": {"config": {"hidden_size": 8}}, "data": {"path": "x"}})
    assert {problem.key for problem in problems} == {"model.tokenizer", "model.config"}


def test_what_several_keys_share_is_overridden_in_one_and_merged_under_what_stands_beside_it(tmp_path):
    shared = "log: &place {dir: runs}\ncheckpoint: {<<: *place, dir: saved}\nevaluation: &none {}\nrecompute: *none\n"
    text = f"{GOOD}\n{shared}"
    config = read_config(write(tmp_path, text), ["log.dir=other", "evaluation.path=text"])
    assert (config.log.dir, config.checkpoint.dir, config.evaluation.path) == ("other", "saved", "text")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("steps: 1\nsteps: 2", "duplicate key 'steps'"),
        ("a: &a [*a]", "is not YAML"),
        ("- a", "does not hold keys and values"),
    ],
)
def test_a_file_that_is_no_mapping_is_an_error(tmp_path, text, message):
    with pytest.raises(LoadError, match=message):
        read_config(write(tmp_path, text))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(LoadError, match="cannot read the configuration file"):
        read_config(tmp_path / "rnu.yaml")


def test_the_reference_explains_every_key():
    page = config_reference()
    for field in dataclasses.fields(TrainConfig):
        assert f"  {field.name}" in page
    assert "optimizer.schedule.warmup_steps" in page and "[0.0003]" in page
    assert not re.search(r"^  data\.\w+ +(\[|One of|$)", page, re.MULTILINE), "a key without a word"
    words = " ".join(page.split())
    assert (
        "One of constant, linear, cosine, warmup_stable_decay. [cosine]" in words and "One of default, reduce-" in words
    )
    assert "mode one of these" not in words and "those above" not in words


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"layout": "fsdp2"}, 1),
        ({"layout": "pp2"}, 8),
        ({"layout": "pp2.fsdp2", "batch_size": 12}, 6),
        ({"layout": "pp2", "batch_size": 64}, 8),
        ({"layout": "pp2", "batch_size": 13}, 13),
        ({"layout": "pp2", "num_microbatches": 2}, 2),
        ({"layout": "pp4", "pipeline": {"schedule": "interleaved_1f1b"}, "batch_size": 24}, 12),
    ],
)
def test_the_number_of_microbatches_fits_schedule_and_rows(values, expected):
    config, problems = build_config({"model": {"path": "m"}, "data": {"path": "d"}, "batch_size": 8, **values})
    assert not problems and num_microbatches_of(config) == expected


def test_rows_that_are_too_few_for_a_schedule_are_said():
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "layout": "pp4", "batch_size": 2}
    (problem,) = build_config(tree)[1]
    assert problem.key == "batch_size" and "use a batch_size that is a multiple of 4" in str(problem)
