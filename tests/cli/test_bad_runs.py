"""Each way in which a run can be wrong is one error in words, before the first step, and never a traceback."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import yaml
from safetensors.torch import load_file, save_file

from shardwise.cli.main import main
from tests.cli.test_train import MODEL, make_tokenizer

pytestmark = pytest.mark.single

RUN = {
    "model": {"path": "model"},
    "data": {"path": "corpus", "seq_length": 32},
    "steps": 2,
    "batch_size": 4,
    "log": {"dir": "log"},
}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A sound run: its file, a model with a tokenizer, text."""
    directory = tmp_path_factory.mktemp("run")
    text = "".join(f"def function_{number}(x):\n    return x + {number}\n\n" for number in range(200))
    (directory / "corpus").mkdir()
    (directory / "corpus/a.txt").write_text(text)
    make_tokenizer(directory / "model", text)
    make_tokenizer(directory / "tokenizer", text)
    values = {name: value for name, value in MODEL.items() if name != "model_type"}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, vocab_size=301)).save_pretrained(
        directory / "model"
    )
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    return directory


@pytest.fixture
def run(origin, tmp_path, monkeypatch):
    """Runs `shardwise train run.yaml WORDS` in a copy of the sound run; gives its exit code."""
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["train", "run.yaml", *words])


def set_config(**values):
    path = Path("model/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def replace_config(text):
    Path("model/config.json").write_text(text)


def empty_model():
    shutil.rmtree("model")
    Path("model").mkdir()


def change_weights(change):
    path = "model/model.safetensors"
    save_file({name: value for key, each in load_file(path).items() for name, value in change(key, each)}, path)


def write_as(kind, **values):
    """A directory with the model of another kind, without a tokenizer."""
    shutil.rmtree("model")
    transformers.AutoConfig.for_model(kind, **values).save_pretrained("model")


def with_head():
    config = transformers.AutoConfig.from_pretrained("model")
    transformers.LlamaForSequenceClassification(config).save_pretrained("model")


def no_room(monkeypatch):
    free = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)


def part(function, *arguments, **options):
    return functools.partial(function, *arguments, **options)


def checkpoint_in(directory):
    def make():
        Path(directory, "step-1").mkdir(parents=True)
        for name in ("manifest.json", "tensors.json", "config.json"):
            Path(directory, "step-1", name).write_text("{}")

    return make


# Name -> (what is done to the run, words of the command line, parts of the one error).
CASES = {
    "config: negative size": (part(set_config, hidden_size=-32), [], ["negative dimension -32"]),
    "config: a list": (part(replace_config, "[]"), [], ["cannot read the model config 'model'"]),
    "config: no JSON": (part(replace_config, "{"), [], ["cannot read the model config 'model'", "not a valid JSON"]),
    "config: a number is text": (
        part(set_config, num_attention_heads="four"),
        [],
        ["cannot read the model config 'model'", "'num_attention_heads' expected int, got str (value: 'four')"],
    ),
    "config: no such type": (part(set_config, model_type="lama"), [], ["cannot read the model config", "lama"]),
    "config: negative layers": (part(set_config, num_hidden_layers=-1), [], ["18 of layers that the model does not"]),
    "config: more layers": (part(set_config, num_hidden_layers=3), [], ["21 of 30 tensors fit", "allow_missing"]),
    "config: fewer layers": (part(set_config, num_hidden_layers=1), [], ["9 of layers that", "allow_unused"]),
    "config: other width": (part(set_config, hidden_size=64), [], ["0 of 21 tensors fit", "[301, 32] in the check"]),
    "config: attention that is not installed": (
        part(set_config, attn_implementation="flash_attention_2"),
        [],
        ["cannot build a model of type 'llama'", "FlashAttention2", "options that it takes"],
    ),
    "new model: text for a number": (
        None,
        ["model={config: {model_type: llama, num_hidden_layers: two}, tokenizer: tokenizer}"],
        ["cannot read the model config values", "'num_hidden_layers' expected int, got str"],
    ),
    "model: empty directory": (empty_model, [], ["transformers cannot read the model config 'model'", "config.json"]),
    "model: an adapter beside": (
        lambda: Path("model/adapter_config.json").write_text("{}"),
        [],
        ["'model' holds an adapter of PEFT", "pass its directory as adapter="],
    ),
    "model: a checkpoint of a run": (
        checkpoint_in("runs"),
        ["model.path=runs"],
        ["model.path: 'runs' is a directory of Shardwise's own checkpoints", "shardwise convert runs --to hf OUT"],
    ),
    "checkpoint.dir: a lock that cannot be opened": (
        lambda: Path("saved/.lock").mkdir(parents=True),
        ["checkpoint.dir=saved"],
        ["the checkpoint cannot be written", "Is a directory"],
    ),
    "model: no generation config": (
        lambda: Path("model/generation_config.json").write_text("[]"),
        [],
        ["model.path: cannot read the generation_config.json of 'model'"],
    ),
    "model: hub id and no hub": (
        None,
        ["model.path=nobody/nothing-like-this"],
        ["model.path: cannot reach the hub for 'nobody/nothing-like-this'"],
    ),
    "model: a directory for its config": (
        None,
        ["model={config: tokenizer, tokenizer: tokenizer}"],
        ["model.config: there is no file tokenizer; name a config.json"],
    ),
    "model: text with a NUL": (None, ['model.path="a\\0b"'], ["nothing can be loaded from 'a\\x00b'"]),
    "model: a name too long": (None, [f"model.path={'x' * 300}"], ["model.path: nothing can be loaded from 'xxx"]),
    "model: no tokenizer": (
        lambda: Path("model/tokenizer.json").unlink(),
        [],
        ["model.tokenizer: cannot load a tokenizer from 'model'"],
    ),
    "model: damaged tokenizer": (
        lambda: Path("model/tokenizer.json").write_text("{}"),
        [],
        ["model.tokenizer: cannot load a tokenizer from 'model'"],
    ),
    **{
        f"{key}: {what}": (None, [f"{key}={name}"], [f"{key}: cannot write to {name!r}", why])
        for key in ("log.dir", "data.cache_dir", "export")
        for what, name, why in (
            ("below a file", "run.yaml/out", "run.yaml is a file"),
            ("a URL", "s3://bucket/out", "it is a URL"),
            ("a file", "run.yaml", "run.yaml is a file"),
        )
    },
    "export: no room": (
        no_room,
        ["export=out"],
        ["export: cannot write to 'out'", "0.00 GiB are needed, and 0.00 GiB are free"],
    ),
    "export: not empty": (None, ["export=corpus"], ["export: the directory corpus is not empty"]),
    "model: t5": (
        part(write_as, "t5", architectures=["T5ForConditionalGeneration"]),
        ["model.tokenizer=tokenizer"],
        ["data: no file below corpus matches **/*.jsonl", "it holds .txt"],
    ),
    "model: vit": (
        part(write_as, "vit", architectures=["ViTForImageClassification"]),
        [],
        ["AutoImageProcessor cannot load from 'model'", "preprocessor_config.json"],
    ),
    "model: of no task": (
        part(write_as, "clip", architectures=["CLIPModel"]),
        [],
        ["model.path: a model of type 'clip'", "knows no task of a CLIPModel", "shardwise.TrainStep"],
    ),
    "model: vit without a class": (part(write_as, "vit", architectures=None), [], ["no class is known for a model of"]),
    "model: a classifier": (with_head, [], ["the tokenizer has no padding token", "fix: set one and save it"]),
    "data: nothing but an empty file": (
        lambda: Path("corpus/a.txt").write_text(""),
        [],
        ["the data holds no text", "every file or line is empty"],
    ),
    "optimizer: other letters": (
        None,
        ["optimizer.name=Adamw"],
        ["no optimizer class 'Adamw' (did you mean 'AdamW'?)"],
    ),
    "optimizer: SparseAdam": (None, ["optimizer.name=SparseAdam"], ["optimizer", "does not support dense gradients"]),
    "layout: tp3": (
        None,
        ["layout=tp3"],
        [
            "cannot split the heads of model.layers.0.self_attn over tp=3, and 1 more like it",
            "4 query heads do not divide among 3 ranks",
            "use tp_size 1, 2, 4",
        ],
    ),
    "fsdp: options without fsdp": (
        None,
        ["fsdp.zero_stage=2"],
        ["fsdp: configures the fsdp and ddp axes; the layout is tp1"],
    ),
    "data.state: another file": (
        lambda: Path("state.json").write_text("{}"),
        ["data.state=state.json"],
        ["data.state: state.json is not a data state"],
    ),
    "weights: one missing": (
        part(change_weights, lambda key, value: [] if "layers.0.self_attn.q_proj" in key else [(key, value)]),
        [],
        ["20 of 21 tensors fit", "model.layers.0.self_attn.q_proj.weight", "model.allow_missing in the file of a run"],
    ),
    "weights: integers": (
        part(change_weights, lambda key, value: [(key, value.int())]),
        [],
        ["0 of 21 tensors fit", "21 of another kind", "torch.int32 in the checkpoint"],
    ),
}


def others_than_logs():
    return sorted(path for path in Path().rglob("*") if "log" not in path.parts)


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_one_error_before_the_first_step(run, capsys, monkeypatch, name):
    prepare, words, parts = CASES[name]
    if prepare is no_room:
        prepare(monkeypatch)
    elif prepare is not None:
        prepare()
    before = others_than_logs()
    capsys.readouterr()
    assert run(*words) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and "Traceback" not in err and "\nerror: " not in err
    assert [each for each in parts if each not in err] == [], err
    assert "step" not in out
    assert others_than_logs() == before


OTHER_RUN = """
import fcntl, sys
with open("saved/.lock", "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("process 7", file=file, flush=True)
    print("holds it", flush=True)
    sys.stdin.read()
"""


def test_a_run_begins_only_where_no_other_saves(run, capsys):
    """And leaves the log alone that the other one writes."""
    Path("saved").mkdir()
    Path("log").mkdir()
    command = [sys.executable, "-c", OTHER_RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "holds it\n"
        Path("log/train.jsonl").write_text('{"step": 1}\n')
        assert run("checkpoint.dir=saved") == 1
        assert "process 7 saves its checkpoints in saved" in capsys.readouterr().err
        assert Path("log/train.jsonl").read_text() == '{"step": 1}\n'
        other.stdin.close()


# Name -> (what is done to the run, words of the command line).
GOOD = {
    "as it is": (None, []),
    "weights: a prefix": (part(change_weights, lambda key, value: [(f"module.{key}", value)]), []),
    "weights: a head of its own": (with_head, ["model.allow_missing=[lm_head]"]),
    "config: fewer layers": (part(set_config, num_hidden_layers=1), ["model.allow_unused=[model.layers.1]"]),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_done_is_done(run, capsys, name):
    prepare, words = GOOD[name]
    if prepare is not None:
        prepare()
    assert run(*words) == 0, capsys.readouterr().err
    assert "step 2/2" in capsys.readouterr().out


def cut_in_half(tokens):
    return tokens[: len(tokens) // 8 * 4]


def flip_a_bit(tokens):
    return tokens[:1000] + bytes([tokens[1000] ^ 1]) + tokens[1001:]


@pytest.mark.parametrize(
    "damage", [cut_in_half, flip_a_bit, lambda t: b"", lambda t: t[:-1], lambda t: b"\xff" * len(t)]
)
def test_kept_tokens_that_are_damaged_are_made_again(run, capsys, caplog, damage):
    assert run() == 0
    (path,) = Path("log/tokens").iterdir()
    sound = path.read_bytes()
    path.write_bytes(damage(sound))
    whole = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("data"))
    assert run() == 0
    out = capsys.readouterr().out
    assert whole in out and "tokenizing" in out and "it is written again" in caplog.text
    assert path.read_bytes() == sound
    assert run() == 0
    assert "tokenizing" not in capsys.readouterr().out, "sound tokens are kept"


def test_a_changed_text_of_the_same_size_and_time_is_read_again(run, capsys):
    assert run() == 0
    path = Path("corpus/a.txt")
    before = path.stat()
    path.write_text(path.read_text().replace("return", "xeturn"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run() == 0
    assert capsys.readouterr().out.count("tokenizing") == 2
    assert sorted(each.name for each in Path("log").glob("*.jsonl")) == ["train.1.jsonl", "train.jsonl"]
