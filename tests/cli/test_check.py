"""`shardwise check` and `plan` say what a run would meet, without starting it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import transformers
import yaml

from shardwise.api.rehearsal import Rehearsal
from shardwise.cli import models
from shardwise.cli.data import read_tokenizer
from shardwise.cli.inputs import check_place
from shardwise.cli.main import main
from shardwise.errors import LoadError
from shardwise.estimate.memory import Card
from tests.cli.test_train import MODEL, make_tokenizer

pytestmark = pytest.mark.single


@pytest.fixture
def run(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("some text")
    make_tokenizer(tmp_path / "tokenizer", "some text")
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"config": MODEL, "tokenizer": str(tmp_path / "tokenizer")},
                "data": {"path": str(tmp_path / "corpus"), "seq_length": 32},
                "layout": "tp2",
            }
        )
    )
    return str(path)


def test_a_good_run_has_no_problems(run, capsys):
    assert main(["check", run, "--world-size", "2"]) == 0
    assert "no problems found (tp2, 2 ranks)" in capsys.readouterr().out


def test_tensor_parallelism_across_machines_is_a_warning(run, capsys):
    words = ["check", run, "layout=fsdp2.tp2", "data.seq_length=16"]
    for number, warned in (("2", ""), ("3", "warning: tp2 crosses machines of 3 ranks: ranks 2 to 3 communicate in")):
        assert main([*words, "--world-size", "4", "--ranks-per-machine", number]) == 0
        assert capsys.readouterr().err.startswith(warned)
    assert main([*words, "--ranks-per-machine", "0"]) == 1


def test_an_optimizer_that_reads_matrices_as_a_whole_is_a_problem_where_they_are_split(run, capsys):
    assert main(["check", run, "optimizer.name=Adafactor"]) == 1
    assert "Adafactor on parameters of this split model" in capsys.readouterr().out
    assert main(["check", run, "optimizer.name=Adafactor", "layout=ddp2"]) == 0


def test_problems_of_every_kind_are_listed_at_once(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    words = [
        "layout=tp2",
        "stepz=3",
        "data.path=nowhere",
        "data.seq_length=999",
        "optimizer.name=AdmaW",
        "optimizer.schedule.warmup_steps=-1",
        f"export={tmp_path / 'full'}",
    ]
    assert main(["check", run, *words, "--world-size", "64"]) == 1
    out = capsys.readouterr().out
    for part in (
        "7 problems",
        "stepz: unknown key (did you mean 'steps'?)",
        "optimizer.schedule.warmup_steps: Input should be greater than or equal to 0, not -1",
        "the layout tp2 needs 2 ranks, but 64 are running",
        "data.path: there is no file or directory nowhere",
        "optimizer: there is no optimizer class 'AdmaW' (did you mean 'AdamW'?)",
        "is not empty",
        "data.seq_length: is 999, but the model has 64 positions",
    ):
        assert part in out, f"{part!r} is not in\n{out}"


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("layout=tp3", "3"),
        ("model.plan={'**.no_such_proj': colwise}", "no_such_proj"),
        ("model.config.hiden_size=64", "did you mean 'hidden_size'"),
        ("model.config.model_type=lama", "did you mean 'llama'"),
        ("model.tokenizer=./nowhere", "nothing can be loaded from './nowhere'"),
        ("optimizer.options.beta=1", "unexpected keyword argument 'beta'"),
        ("optimizer.name=LBFGS", "optimizer: LBFGS computes the loss several times a step"),
        ("optimizer.name=torch.optim.SDG", "no optimizer class"),
        ("recompute={mode: full, modules: [model.layers.*.mpl]}", "model: Recompute pattern"),
        (
            "optimizer.options.betas=[2.0, 0.9]",
            "optimizer: AdamW cannot be built with these options\n       why: Invalid beta parameter",
        ),
        ("optimizer.options={betas: 3}", "'int' object is not subscriptable"),
        ("optimizer.groups=[{max_dims: 1, weight_deca: 0}]", "AdamW has no argument 'weight_deca' (did"),
        ("optimizer.groups=[{max_dims: 1, lr: fast}]", "optimizer: AdamW cannot be built with these options"),
        ("adapter={target_modules: '[q_proj'}", "unterminated character set"),
        ("adapter={target_modules: [q_proj], peft_type: IA3}", "adapter.peft_type is IA3; a run trains LORA"),
        ("adapter={target_modules: [q_proj], task_type: SEQ_CLS}", "is SEQ_CLS; a run trains CAUSAL_LM"),
        ("checkpoint={dir: saved, change: [optimiser.lr]}", "no key 'optimiser.lr' (did you mean 'optimizer"),
        ("adapter={target_modules: nothing}", "adapter: the adapter does not fit LlamaForCausalLM"),
        (f"data={{path: {'x' * 300}, seq_length: 8}}", "data.path: cannot read xxx"),
        ("data.state=nowhere.json", "data.state: cannot read nowhere.json"),
        ("compilation.backend=indutcor", "model: Compile backend is 'indutcor' (did you mean 'inductor'?)"),
        ("optimizer.groups=[{params: '**.nothing', lr: 1}]", "fits no parameter"),
        ("optimizer.name=..AdamW", "no optimizer class"),
        (
            "data.seq_length=1",
            "data.seq_length: Input should be greater than or equal to 2, not 1",
        ),  # and not the default, which is too long
        ("data={dataset: none, seq_length: 8}", "data.dataset: 'none' needs the package datasets"),
        ("log={to: [wandbb]}", "log.to[0]: accelerate has no tracker 'wandbb' (did you mean 'wandb'?)"),
        ("log={to: [wandb]}", "log.to[0]: the package of the tracker 'wandb' is not installed"),
        ("log={callbacks: ['json:nothing']}", "log.callbacks[0]: there is no class 'json:nothing'"),
        ("layout=dp2", "data ranks are fsdp, which share out the parameters, or ddp"),
        ("layout=ep2", "expert parallelism (ep) is not supported yet"),
        ("learning_rate=1", "learning_rate: unknown key: it is optimizer.lr here"),
        ("sequence_len=1", "sequence_len: unknown key: it is data.seq_length here"),
        ("training.steps=1", "training: unknown key: it is steps here"),
        ("optimizer.type=Adam", "optimizer.type: unknown key: it is optimizer.name here"),
        ("data={path: here, format: chat, seq_length: 8}", "no file below here matches **/*.jsonl"),
    ],
)
def test_each_of_these_is_a_problem(run, capsys, monkeypatch, word, part):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(Path(run).parent)
    Path("here").mkdir()
    assert main(["check", run, word]) == 1
    out = capsys.readouterr().out
    assert ": 1 problem\n" in out and part in out


def test_a_run_that_goes_on_is_told_now_that_its_export_would_mix_with_an_adapter(run, tmp_path, capsys):
    for each in (tmp_path / "saved" / "step-2" / "manifest.json", tmp_path / "out" / "adapter_config.json"):
        each.parent.mkdir(parents=True)
        each.write_text("{}")
    assert main(["check", run, f"checkpoint.dir={tmp_path / 'saved'}", f"export={tmp_path / 'out'}"]) == 1
    assert "holds an adapter" in capsys.readouterr().out


def test_a_run_that_would_go_on_from_a_damaged_checkpoint_is_told_now(run, tmp_path, capsys):
    (tmp_path / "saved" / "step-2" / "manifest.json").parent.mkdir(parents=True)
    (tmp_path / "saved" / "step-2" / "manifest.json").write_text("{")
    assert main(["check", run, f"checkpoint.dir={tmp_path / 'saved'}"]) == 1
    assert "checkpoint.dir: manifest.json is damaged" in capsys.readouterr().out
    assert main(["check", run, f"checkpoint={{dir: {tmp_path / 'saved'}, resume: never}}"]) == 1
    assert "holds checkpoints of another run: step-2" in capsys.readouterr().out


def test_an_encoder_is_no_causal_model(run, capsys):
    assert (
        main(
            [
                "check",
                run,
                "model.config={model_type: bert, hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 1}",
            ]
        )
        == 1
    )
    assert "use is_decoder=True in its config" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["bert", "gemma", "gpt2", "llama", "qwen3", "t5"])
def test_a_model_directory_without_tokenizer_files_is_a_problem(run, tmp_path, capsys, kind):
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path / "bare")
    assert main(["check", run, f"model.tokenizer={tmp_path / 'bare'}"]) == 1
    assert "model.tokenizer: cannot load a tokenizer from" in (out := capsys.readouterr().out), out


def test_what_does_not_bear_being_rehearsed_is_no_problem(run, monkeypatch):
    def fail(self):
        raise RuntimeError("a fake tensor has no values")

    monkeypatch.setattr(Rehearsal, "open", fail)
    assert main(["check", run]) == 0


def test_the_plan_is_printed_for_a_run_a_config_and_a_directory(run, tmp_path, capsys):
    assert main(["plan", run]) == 0
    printed = capsys.readouterr().out
    assert f"[{len(read_tokenizer(str(tmp_path / 'tokenizer'), option=''))}, 32]" in printed  # as `train` has it
    assert "q_proj" in printed and "colwise" in printed
    assert "between forward and backward of 8 x 32 tokens it holds" in printed
    assert main(["plan", run, "--layout", "fsdp16.tp2"]) == 0
    assert "between forward and backward of 1 x 32 tokens it holds" in capsys.readouterr().out
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODEL, "vocab_size": 64}))
    assert main(["plan", str(tmp_path), "--layout", "tp4", "--sequence-parallel"]) == 0
    capsys.readouterr()
    assert main(["plan", str(config), "--layout", "fsdp2", "--batch", "2x16", "--compute", "bfloat16"]) == 0
    assert "2 x 16 tokens" in capsys.readouterr().out
    assert main(["plan", str(config), "--layout", "fsdp2", "--batch", "2,16"]) == 1
    assert "cannot read --batch 2,16" in capsys.readouterr().err
    assert main(["plan", str(config), "--layout", "tp2", "--batch", "2x65"]) == 1
    assert "rows of 65 tokens\n  why: the model sees 64 positions" in capsys.readouterr().err
    assert main(["plan", str(config), "--layout", "tp2", "--batch", f"{10**20}x64"]) == 1
    assert "tokens on a data rank" in capsys.readouterr().err
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    for kind, named in (("t5", "T5ForConditionalGeneration"), ("vit", None)):
        config.write_text(json.dumps({"model_type": kind, "architectures": named and [named], **sizes}))
        assert main(["plan", str(config), "--layout", "fsdp2"]) == (0 if named else 1)
    assert "no class is known for a model of type 'vit'" in capsys.readouterr().err
    config.write_text(json.dumps({**MODEL, "vocab_size": 64}))
    drawn = tmp_path / "steps.svg"
    assert main(["plan", str(config), "--layout", "pp2.fsdp2", "--batch", "2x16", "--timeline", str(drawn)]) == 0
    assert drawn.read_text().startswith("<svg")
    shown = capsys.readouterr().out
    assert "1f1b: 2 microbatches through 2 stages on 2 ranks" in shown
    assert "pp 1: stage 1: 1 layer, model.layers.1" in shown and "holds activations of up to 2 microbatches: " in shown
    assert "stage 0 sends 1 tensor of" in shown
    assert main(["plan", str(config), "--layout", "pp2.tp2", "--batch", "2x16"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"over tp, a microbatch: stage 0: .*\b5 all-reduces", shown), shown
    assert "over tp, a microbatch: stage 1: " in shown
    assert main(["plan", str(config), "--layout", "cp2"]) == 1
    assert "only pp, ddp, fsdp and tp" in capsys.readouterr().err
    assert main(["plan", str(config)]) == 1
    assert "no layout is given" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "corpus"), "--layout", "tp2"]) == 1
    assert "cannot read the model config" in capsys.readouterr().err
    assert main(["plan", "./nowhere", "--layout", "tp2"]) == 1
    assert "nothing can be loaded from './nowhere'" in capsys.readouterr().err


def test_a_plan_takes_overrides_of_a_run(run, tmp_path, capsys):
    assert main(["plan", run, "layout=tp1", "data.seq_length=16", "--compute", "float32", "batch_size=3"]) == 0
    assert "between forward and backward of 3 x 16 tokens it holds" in (out := capsys.readouterr().out)
    assert "plan for tp1" in out
    assert main(["plan", run, "stps=5"]) == 1
    assert "stps: unknown key (did you mean 'steps'?)" in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "layout=tp4"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: layout=tp4 after {tmp_path}\n  why: key=value changes a key of a run")
    assert "--layout tp2" in err


def test_like_stages_are_one_line_and_sizes_are_readable(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODEL, "vocab_size": 64, "num_hidden_layers": 4}))
    assert main(["plan", str(config), "--layout", "pp4.fsdp2.tp2", "--batch", "2x16", "--card", "80GB"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"pp 1-2: stages 1-2, each: 1 layer, model.layers.1 to model.layers.2; .* up to 2-3 micro", out)
    assert out.count("holds activations of up to") == 3
    assert "over pp, a microbatch: stages 0-2, each: sends 1 tensor of" in out
    assert "over tp, a microbatch: stages 1-2, each: 1 all-gather" in out
    of_step = r"a step needs about .* of pp 0: parameters .*, unsharded gradients .*, activations of 4 microbatches "
    assert re.search(of_step, out) and "fits 80 GB: yes, " in out
    config.write_text(json.dumps({**MODEL, "vocab_size": 2**20, "hidden_size": 256, "num_attention_heads": 4}))
    assert main(["plan", str(config), "--layout", "tp2"]) == 0
    assert "from step to step in float32: parameters 1.00 GiB, gradients 1.00 GiB" in capsys.readouterr().out


def test_a_card_that_is_too_small_is_told_with_what_would_fit(run, tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**MODEL, "vocab_size": 64, "num_hidden_layers": 1}))
    words = ["plan", str(config), "--card", "0.0005GiB", "--layout"]
    assert main([*words, "tp1", "--batch", "4x32"]) == 0
    answer = capsys.readouterr().out.splitlines()[-1]
    assert answer.startswith("fits 0.0005 GiB: no, ") and " of 0.5 MiB: it would with recompute mode full (" in answer
    layouts = re.findall(r"layout (\S+) \(", answer)
    assert layouts and ("microbatches of 2 x 32 tokens" in answer) and "layout tp2" in answer
    for layout in {layouts[0], layouts[-1]}:
        assert main([*words, layout, "--batch", "4x32"]) == 0
        assert "fits 0.0005 GiB: yes, " in capsys.readouterr().out
    assert main([*words, "tp1", "--batch", "128x32"]) == 0
    assert "half of the rows or bfloat16 are not enough" in capsys.readouterr().out
    assert main([*words, "tp1"]) == 0
    assert "are kept from step to step; --batch" in capsys.readouterr().out
    assert main(["plan", str(config), "--layout", "tp1", "--card", "80"]) == 1
    assert "cannot read --card 80\n  fix: write its memory, such as 80GB" in capsys.readouterr().err
    monkeypatch.setattr(models, "find_gpu", lambda: Card("the card that is there", 2**33))
    assert main(["plan", str(config), "--layout", "tp1", "--batch", "4x32"]) == 0
    assert "fits the card that is there: yes, " in capsys.readouterr().out
    assert main(["check", run, "--card", "24GB"]) == 0
    capsys.readouterr()
    assert main(["check", run, "--card", "0.0003GB", "layout=pp2", "num_microbatches=2"]) == 1
    out = capsys.readouterr().out
    assert "1. batch_size: a step needs 0." in out and "0.0003 GB are 0.3 MiB" in out
    assert "; it would with recompute mode full and " in out


def test_a_place_is_checked_and_not_created(tmp_path):
    check_place(str(tmp_path / "runs" / "latest"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "num_bytes", "why"), [("file/log", 0, "is a file"), ("s3://bucket", 0, "a URL"), ("a", 2**80, "free")]
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch, place, num_bytes, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match=f"cannot write to {place!r}\n  why: .*{why}"):
        check_place(place, num_bytes=num_bytes)
