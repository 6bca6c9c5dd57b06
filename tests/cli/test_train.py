"""`shardwise train` from text to an exported model, and what it leaves behind when it is stopped."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from shardwise.cli.config_file import build_config
from shardwise.cli.training import train
from shardwise.data.ahead import PackedBatches
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import spawn
from shardwise.weights.write import PlannedShards
from tests.cli.forked import run_forked  # noqa: F401 - a fixture
from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.spawn

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_tokenizer(directory, text):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=301, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(directory)


@pytest.fixture
def tree(tmp_path):
    """A run over a small corpus: what its YAML file holds."""
    text = "".join(f"def function_{number}(x):\n    return x + {number}\n\n" for number in range(400))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.py").write_text(text)
    make_tokenizer(tmp_path / "tokenizer", text)
    return {
        "model": {"config": MODEL, "tokenizer": str(tmp_path / "tokenizer")},
        "data": {"path": str(tmp_path / "corpus"), "seq_length": 32},
        "layout": "tp2",
        "sequence_parallel": True,
        "steps": 6,
        "batch_size": 4,
        "num_microbatches": 2,
        "optimizer": {"lr": 0.01, "schedule": {"warmup_steps": 2}},
        "log": {"dir": str(tmp_path / "logs"), "every": 2},
    }


def config_of(tree):
    config, problems = build_config(tree)
    assert not problems
    return config


def train_rank(tree):
    record = train(config_of(tree))
    return record.loss


def losses_of(tree):
    lines = (Path(tree["log"]["dir"]) / "train.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


STARTED = []


@pytest.fixture(autouse=True)
def nothing_runs_on():
    """A test that fails must not leave its run after, to slow down all that follow."""
    yield
    while STARTED:
        run = STARTED.pop()
        if run.poll() is None:
            run.kill()
        run.communicate()


def start(path, *overrides, in_own_group=False):
    command = [sys.executable, "-m", "shardwise", "train", str(path), *overrides]
    # A shell's background jobs ignore Ctrl-C and so would this run, if the suite is one of them.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=in_own_group,
        preexec_fn=listen,  # noqa: PLW1509 - one thread
    )
    STARTED.append(run)
    return run


def test_two_ranks_train_as_one_and_export_a_model_that_transformers_loads(tree, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = tmp_path / "exported"
    results = spawn(train_rank, 2, {**tree, "export": str(exported)})
    assert results[0] == results[1]
    split = losses_of(tree)
    alone = {**tree, "layout": "tp1", "sequence_parallel": False, "num_microbatches": 1}
    train_rank(alone)
    assert split == pytest.approx(losses_of(alone), abs=1e-4)
    assert split[-1] < split[0] - 0.5

    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("def function_7(x):\n    return x + 7", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert float(model(input_ids=ids, labels=ids).loss) < split[0] - 0.5
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    assert not list(tmp_path.glob(".*")) and not list((tmp_path / "logs").rglob(".*"))
    kept = yaml.safe_load((tmp_path / "logs" / "config.yaml").read_text())
    assert kept["model"]["config"]["model_type"] == "llama" and kept["optimizer"]["lr"] == 0.01


def test_a_pipeline_has_the_loss_curve_of_one_process_and_one_step_is_timed(tree, tmp_path):
    num_steps = 50 if FULL_PRODUCT else 8
    (tmp_path / "corpus" / "a.py").write_text(Path(json.decoder.__file__).read_text() * 3)
    staged = {**tree, "layout": "pp2", "sequence_parallel": False, "steps": num_steps}
    staged["log"] = {**tree["log"], "timeline": 2, "every": 1}
    first, second = spawn(train_rank, 2, staged)
    assert first == second
    curve = losses_of(tree)
    logs = Path(tree["log"]["dir"])
    assert (logs / "timeline.svg").read_text().startswith("<svg")
    events = json.loads((logs / "timeline.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    ran = {(event["pid"], event["tid"], event["name"]) for event in events if event["ph"] == "X"}
    assert names == ["step 2"]
    assert (0, 0, "0F0") in ran and (0, 1, "1B1") in ran

    train_rank({**staged, "layout": "tp1", "log": {**staged["log"], "timeline": None}})
    alone = losses_of(tree)
    assert len(curve) == len(alone) == num_steps
    assert curve == pytest.approx(alone, abs=1e-4)
    assert curve[-1] < curve[0] - (1.0 if FULL_PRODUCT else 0.3)


def train_on_a_corpus_of_its_own(tree):
    """A rank of a machine of its own, whose copy of the corpus is another."""
    rank, os.environ["LOCAL_RANK"] = os.environ["RANK"], "0"
    corpus = Path(tree["data"]["path"])
    (corpus / rank).mkdir()
    (corpus / rank / "a.py").write_text((corpus / "a.py").read_text().replace("return x + 7\n", f"return x + {rank}\n"))
    own = {"path": str(corpus / rank), "cache_dir": str(corpus.parent / f"tokens-{rank}")}
    with pytest.raises(ShardwiseError) as raised:
        train_rank({**tree, "data": {**tree["data"], **own}})
    return str(raised.value)


def test_ranks_that_see_different_text_are_told_before_the_first_step(tree):
    first, second = spawn(train_on_a_corpus_of_its_own, 2, {**tree, "layout": "ddp2", "sequence_parallel": False})
    assert first == second and "the ranks read different data" in first and "on rank 1: " in first
    assert not (Path(tree["log"]["dir"]) / "train.jsonl").exists()


def test_training_goes_on_from_an_exported_model_behind_the_rows_of_the_first_run(tree, tmp_path, monkeypatch):
    alone = {**tree, "layout": "tp1", "sequence_parallel": False}
    train_rank({**alone, "export": str(tmp_path / "exported")})
    first = losses_of(tree)
    (cached,) = (tmp_path / "logs" / "tokens").iterdir()
    stamp = cached.stat().st_mtime_ns
    state = json.loads((tmp_path / "logs" / "data_state.json").read_text())
    assert state["num_batches_read"] == tree["steps"], "in the middle of the first pass"
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(state))
    read = []
    monkeypatch.setattr(
        PackedBatches, "_row", lambda self, place, own=PackedBatches._row: read.append(place) or own(self, place)
    )
    onward = {**alone, "model": {"path": str(tmp_path / "exported")}, "data": {**tree["data"], "state": str(kept)}}
    train_rank(onward)
    assert read == list(range(24, 48)), "the rows after those of the first run"
    assert losses_of(tree)[0] < first[0] - 0.5
    with pytest.raises(ShardwiseError, match="batch_size was 4, is 8"):
        train_rank({**onward, "batch_size": 8})
    assert cached.stat().st_mtime_ns == stamp and len(list((tmp_path / "logs" / "tokens").iterdir())) == 1


def train_without_room(tree):
    """A run whose export finds the disk full at the end; gives its error."""
    write = PlannedShards.write

    def fail(self, name, tensor):
        if "exports" in self.path(0).parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, tensor)

    PlannedShards.write = fail
    try:
        train_rank(tree)
    except ShardwiseError as error:
        return str(error)
    finally:
        PlannedShards.write = write


def test_weights_that_cannot_be_exported_are_kept_beside_the_log(tree, tmp_path):
    train_rank({**tree, "layout": "tp1", "sequence_parallel": False, "export": str(tmp_path / "exported")})
    first, second = spawn(train_without_room, 2, {**tree, "export": str(tmp_path / "exports" / "out")})
    assert first == second
    kept = tmp_path / "logs" / "unexported"
    assert f"exports/out; it is in {kept}" in first and "No space left on device" in first
    assert (kept / "tokenizer.json").exists() and not list((tmp_path / "exports" / "out").glob("model*"))
    found, expected = (load_file(place / "model.safetensors") for place in (kept, tmp_path / "exported"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-3, rtol=0)
    assert (tmp_path / "logs" / "data_state.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"seq_length": 65}}, "data.seq_length: is 65, but the model has 64 positions"),
        ({"model": {"config": {**MODEL, "vocab_size": 64}}}, "model.tokenizer: has 301 tokens, the model only 64"),
        ({"model": {"tokenizer": "./nowhere"}}, "nothing can be loaded from './nowhere'"),
        ({"data": {"seq_length": 60}, "batch_size": 2}, None),
    ],
)
def test_what_does_not_fit_is_an_error_before_the_first_step(tree, changes, message):
    merged = {key: {**tree[key], **value} if isinstance(value, dict) else value for key, value in changes.items()}
    run = {**tree, "layout": "tp1", "sequence_parallel": False, **merged}
    if message is None:
        train_rank(run)
    else:
        with pytest.raises(ShardwiseError, match=message):
            train_rank(run)
        assert not (Path(tree["log"]["dir"]) / "train.jsonl").exists()


def test_the_command_starts_its_ranks_and_shows_the_first_failure_once(tree, tmp_path, run_forked, capfd):  # noqa: F811
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert run_forked(path, "optimizer.lr=1e30", "optimizer.schedule.warmup_steps=0") == 1
    out, err = capfd.readouterr()
    assert out.count("step 1/6") == 1, "one rank speaks for all"
    assert err.count("training diverged") == 1 and err.startswith("error: ") and "Traceback" not in err


SHARDED = ["layout=fsdp2", "sequence_parallel=false"]


@pytest.fixture
def endless(tree, tmp_path):
    """A run that goes on until somebody ends it, as the words of the command."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path, "steps=100000", f"export={tmp_path / 'exported'}"


def test_ctrl_c_ends_every_rank_and_leaves_nothing_half_written(tree, tmp_path, endless, run_forked, capfd):  # noqa: F811
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # of a job in the background it is ignored

    def interrupt(ranks):
        os.kill(os.getpid(), signal.SIGINT)

    code = run_forked(*endless, *SHARDED, log=Path(tree["log"]["dir"]) / "train.jsonl", at_first_step=interrupt)
    signal.signal(signal.SIGINT, before)
    check_interrupted(tree, tmp_path, code, capfd.readouterr().err)


def test_ctrl_c_ends_the_command(tree, tmp_path, endless):
    run = start(*endless, "layout=tp1", "sequence_parallel=false")
    while "step" not in (line := run.stdout.readline()) or line.startswith("run"):
        assert run.poll() is None, run.stderr.read()
    run.send_signal(signal.SIGINT)
    err = run.communicate(timeout=90)[1]
    check_interrupted(tree, tmp_path, run.returncode, err)


def check_interrupted(tree, tmp_path, code, err):
    assert code == 130
    assert err == "interrupted; no partly written files were left behind\n"
    assert not list(tmp_path.rglob(".*")) and not (tmp_path / "exported").exists()
    assert losses_of(tree), "every line so far is whole JSON"
