"""`shardwise evaluate` and `shardwise generate`."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from PIL import Image

from shardwise.cli.main import main
from tests.cli.test_train import MODEL, make_tokenizer

pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A run that has trained, with a model, checkpoints and held-out text."""
    directory = tmp_path_factory.mktemp("verbs")
    text = "".join(f"def function_{number}(x):\n    return x + {number}\n\n" for number in range(200))
    (directory / "corpus").mkdir()
    (directory / "corpus/a.txt").write_text(text)
    make_tokenizer(directory / "model", text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}def"
    tokenizer.save_pretrained(directory / "model")
    values = {name: value for name, value in MODEL.items() if name != "model_type"}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, vocab_size=301)).save_pretrained(
        directory / "model"
    )
    run = {
        "model": {"path": str(directory / "model")},
        "data": {"path": str(directory / "corpus"), "seq_length": 32},
        "evaluation": {"path": str(directory / "corpus"), "max_batches": 2},
        "checkpoint": {"dir": str(directory / "saved")},
        "steps": 6,
        "batch_size": 4,
        "optimizer": {"lr": 0.02},
        "log": {"dir": str(directory / "log")},
        "export": str(directory / "out"),
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["train", str(directory / "run.yaml")]) == 0
    return directory


@pytest.mark.parametrize("layout", ["tp1", "fsdp2", "pp2"])
def test_the_newest_checkpoint_is_measured(origin, capfd, layout):
    assert main(["evaluate", str(origin / "run.yaml"), f"layout={layout}"]) == 0
    out = capfd.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(origin / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(origin / "out")
    ids = tokenizer((origin / "corpus/a.txt").read_text(), return_tensors="pt")["input_ids"][0, : 8 * 32].view(8, 32)
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert f"saved/step-6: loss {loss:.4f}  perplexity" in out


def test_held_out_data_is_needed(origin, capfd):
    assert main(["evaluate", str(origin / "run.yaml"), "evaluation.path=null", "evaluation.max_batches=50"]) == 1
    assert "evaluation.path is missing" in capfd.readouterr().err


def expected_text(directory, prompt, number):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=number, do_sample=False)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
def test_a_model_and_a_checkpoint_write_alike(origin, capfd, monkeypatch, layout):
    expected = expected_text(origin / "out", "def function", 12)
    words = ["--max-new-tokens", "12", "--layout", layout]
    assert main(["generate", str(origin / "out"), "--prompt", "def function", *words]) == 0
    assert expected.strip() in capfd.readouterr().out.replace("[rank 0] ", "")
    if layout == "tp2":
        return
    monkeypatch.setattr(sys, "stdin", io.StringIO("def function"))
    assert main(["generate", str(origin / "saved"), "--tokenizer", str(origin / "model"), *words]) == 0
    assert expected.strip() in capfd.readouterr().out.replace("[rank 0] ", "")


def test_a_chat_is_answered_by_the_template(origin, capfd):
    assert main(["generate", str(origin / "out"), "--chat", "--prompt", "hi", "--max-new-tokens", "8"]) == 0
    assert expected_text(origin / "out", "user: hi\ndef", 8).strip() in capfd.readouterr().out
    Path(origin / "bare").mkdir()
    make_tokenizer(origin / "bare", "hello")
    words = ["--tokenizer", str(origin / "bare"), "--chat", "--prompt", "hi"]
    assert main(["generate", str(origin / "out"), *words]) == 1
    assert "no chat template" in capfd.readouterr().err
    assert main(["generate", str(origin / "out"), "--prompt", "a", "--layout", "fsdp2"]) == 1
    assert "has data ranks" in capfd.readouterr().err


def test_what_cannot_be_written_is_said(origin, tmp_path, capfd):
    config = transformers.BertConfig(vocab_size=301, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    values = {"vocab_size": 301, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    config = transformers.GPT2Config(**values, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer = ["--tokenizer", str(origin / "model")]
    for words, says in (
        ([str(origin / "out"), "--prompt", ""], "the prompt is empty"),
        ([str(origin / "out"), "--prompt", "a", "--max-new-tokens", "0"], "use 1 token or more"),
        ([str(origin / "out"), "--prompt", "a", "--temperature=-1"], "a finite temperature from 0 on"),
        ([str(tmp_path / "bert"), "--prompt", "a", *tokenizer], "text from a BertForMaskedLM"),
        ([str(tmp_path / "gpt2"), "--prompt", "a", *tokenizer], "the model has 8 positions: use a smaller --max-new"),
    ):
        assert main(["generate", *words]) == 1
        assert says in capfd.readouterr().err
    (tmp_path / "train.jsonl").write_text('[1]\n{"text": "a"}\n{"st')
    assert main(["report", str(tmp_path)]) == 1
    assert "train.jsonl holds no step" in capfd.readouterr().err
    assert main(["report", str(origin / "log"), "--out", str(tmp_path)]) == 1
    assert f"cannot write {tmp_path}" in capfd.readouterr().err


def test_a_page_tells_of_a_run(origin, tmp_path, capfd):
    run = yaml.safe_load((origin / "run.yaml").read_text())
    run |= {"layout": "pp2", "log": {"dir": str(tmp_path), "timeline": 3}, "checkpoint": {}, "export": None}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert len(json.loads((tmp_path / "ranks.json").read_text())["memory_bytes"]) == 2
    for part in ("step 6, loss", "held out", "perplexity", "tokens a second", "most memory", "stage", "checkpoint.dir"):
        assert part in page, part
    assert page.count("<svg") >= 4 + 2 + 1, "curves, ranks and the timeline"
    assert not re.search(r"(src|href)=|@import|url\(", page), "nothing is fetched"
    HTMLParser().feed(page)
    if (browser := shutil.which("chromium")) is not None:
        shot, options = tmp_path / "page.png", ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"]
        subprocess.run([browser, *options, f"--screenshot={shot}", f"file://{tmp_path}/page.html"], check=True)
        drawn = {colour for _, colour in Image.open(shot).convert("RGB").getcolors(2**20)}
        assert {(0x33, 0x67, 0xD6), (0xD9, 0x65, 0x2B)} <= drawn, "both curves of the loss"
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "holds no train.jsonl" in capfd.readouterr().err
