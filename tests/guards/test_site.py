"""What the pages say holds: links and anchors lead somewhere, files of runs are read, messages are the program's."""

from __future__ import annotations

import re
import runpy
import shlex
import unicodedata
from pathlib import Path

import pytest
import yaml

from shardwise.cli.config_file import parse_config
from shardwise.ranks.spawn import spawn
from tests.cli.forked import run_forked  # noqa: F401 - a fixture
from tests.guards.sources import DOCUMENTS, ROOT, name_of, snippets
from tests.guards.test_documents import run_as_script

pytestmark = pytest.mark.single

BASE = {"model": {"path": "model"}, "data": {"path": "corpus"}, "batch_size": 64}
HELD_OUT = {"evaluation": {"path": "held-out"}, "checkpoint": {"dir": "saved"}}


def anchors_of(path):
    """Of a page's headings: those that GitHub and mkdocs call the same."""
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        plain = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
        if words.replace(" ", "-") == re.sub(r"[-\s]+", "-", plain):
            found.add(words.replace(" ", "-"))
    return found


def test_links_and_anchors_lead_somewhere():
    lost = []
    for path in DOCUMENTS:
        text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
            place = (path.parent / target).resolve() if target else path
            if not place.exists() or (anchor and anchor not in anchors_of(place)):
                lost.append(f"{name_of(path)}: {target}#{anchor}")
    assert not lost


def test_every_page_is_in_the_navigation():
    menu = re.findall(r": ([\w/.-]+\.md)$|^ +- ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if page.startswith("decisions/")}
    assert {first or second for first, second in menu} - decisions == pages - decisions


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=lambda s: s.place)
def test_runs_shown_are_read(snippet, tmp_path):
    """What a part of a run leaves out is added. What other programs read is fenced as `yml`."""
    rest = {key: value for key, value in BASE.items() if key not in yaml.safe_load(snippet.text)}
    (tmp_path / "run.yaml").write_text(f"{snippet.text}\n{yaml.safe_dump(rest) if rest else ''}")
    assert not parse_config(tmp_path / "run.yaml")[1]


def commands_with_keys():
    for snippet in snippets("bash", "sh", "shell", "console"):
        if not snippet.place.startswith("docs/errors.md"):
            for line in snippet.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:1] == ["shardwise"] and words[1] in ("train", "check", "evaluate"):
                    yield snippet.place, [word for word in words[2:] if "=" in word and not word.startswith("-")]


def test_keys_on_command_lines_are_a_runs(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**BASE, **HELD_OUT}))
    wrong = {
        (place, *words): problems
        for place, words in commands_with_keys()
        if (problems := parse_config(tmp_path / "run.yaml", words)[1]) and "learning_rate=1e-4" not in words
    }
    assert not wrong


@pytest.mark.spawn
@pytest.mark.parametrize(
    "snippet",
    [
        each
        for each in snippets("python")
        if re.match(r"docs/(checkpoints|pipelines|migrate/index)", each.place) and "Mesh.open" in each.text
    ],
    ids=lambda s: s.place,
)
def test_loops_shown_run(snippet, tmp_path):
    assert all(found["loss"] < 6 for found in spawn(run_as_script, 2, snippet.text, [], tmp_path))


@pytest.mark.spawn
def test_the_readmes_loop_prints_what_it_shows(tmp_path):
    (loop,) = [each for each in snippets("python") if each.place.startswith("README")]
    shown = re.findall(r"^Mesh\(.*loss (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [f"{found['loss']:.4f}" for found in spawn(run_as_script, 2, loop.text, [], tmp_path)] == shown


def test_the_readme_shows_what_plan_prints_of_the_demo(tmp_path, monkeypatch, capsys):
    from shardwise.cli.main import main

    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/recipes/inputs.py"))["single_bytes"]().save_pretrained("tokenizer")
    main(["plan", str(runpy.run_path(str(ROOT / "examples/demo.py"))["write_run"](tmp_path))])
    (block,) = [each.text for each in snippets("text") if each.place.startswith("README")]
    shown = block.partition("$ shardwise train")[0].splitlines()[1:]
    assert len(shown) > 5 and {*shown} - {"..."} <= {*capsys.readouterr().out.splitlines()}


ERRORS = [each for each in snippets("console", "pycon") if each.place.startswith("docs/errors.md")]


@pytest.mark.spawn
def test_the_errors_shown_are_the_programs(tmp_path, monkeypatch, capfd, run_forked):  # noqa: F811
    import torch

    from shardwise.cli.main import main

    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/fine_tuning.py"))["make_model"](Path("model"))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.py").write_text("".join(f"def function_{n}(x):\n    return x + {n}\n\n" for n in range(400)))
    (tmp_path / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}\n'
    )
    run = next(each for each in snippets("yaml") if each.place.startswith("docs/errors.md")).text
    (tmp_path / "run.yaml").write_text(run)
    assert run_forked("run.yaml", "checkpoint.dir=saved", "steps=2") == 0
    for snippet in ERRORS:
        if snippet.language == "console" and not ("device=cuda" in snippet.text and torch.cuda.is_available()):
            command, _, expected = snippet.text.partition("\n")
            capfd.readouterr()
            words = shlex.split(command)[2:]
            assert run_forked(*words[1:]) if words[0] == "train" else main(words)
            shown = capfd.readouterr()
            assert expected in (shown.err if words[0] == "train" else shown.out), snippet.place


def raised_by(lines):
    """The errors of lines, on a llama that is split over this rank and another."""
    import torch
    from transformers import LlamaConfig

    import shardwise

    config = LlamaConfig(
        vocab_size=999, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4
    )
    ids = torch.arange(512).view(4, 128)
    found = []
    with shardwise.Mesh.open("tp2") as mesh:
        model = shardwise.load(config, mesh).train()
        model(input_ids=ids, labels=ids).loss.backward()
        names = {"shardwise": shardwise, "torch": torch, "config": config, "ids": ids, "mesh": mesh, "model": model}
        for line in lines:
            try:
                exec(line, names)
            except shardwise.ShardwiseError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.spawn
def test_the_errors_of_python_are_the_programs():
    shown = [each.text.removeprefix(">>> ").partition("\n") for each in ERRORS if each.language == "pycon"]
    for found in spawn(raised_by, 2, [line for line, _, _ in shown]):
        assert found == [text for _, _, text in shown]
