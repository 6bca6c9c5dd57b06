"""What we show must be true: snippets compile, commands exist, examples run."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.ranks.spawn import spawn
from tests.cli.forked import run_forked  # noqa: F401 - a fixture
from tests.families import FULL_PRODUCT
from tests.guards.sources import DOCUMENTS, ROOT, snippets
from tests.programs import run_script

pytestmark = pytest.mark.single

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HEAVY = {"demo.py"}  # minutes long: `make demo` runs it
if not FULL_PRODUCT:  # what they call is tested by others: `make coverage` runs them
    HEAVY |= {"automodel_nvfsdp.py", "dpo_trl.py", "finetune_trainer.py", "text_to_model.py"}
PROGRAMS = {"lightning_training.py"}  # run in a process of their own, with all that they start
SHELL_SNIPPETS = snippets("bash", "sh", "shell", "console")


def commands_shown():
    """Every subcommand of a `shardwise ...` line in a shell snippet, with the places that show it."""
    found = {}
    for snippet in SHELL_SNIPPETS:
        for line in snippet.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["shardwise"] and len(words) > 1 and not words[1].startswith("-"):
                found.setdefault(words[1], []).append(snippet.place)
    return found


def make_verbs_shown():
    return {verb for s in SHELL_SNIPPETS for verb in re.findall(r"^\$? ?make ([a-z]+)", s.text, re.MULTILINE)}


@pytest.mark.parametrize("snippet", snippets("python", "py"), ids=lambda s: s.place)
def test_python_snippets_compile_and_import_what_exists(snippet):
    compile(snippet.text, snippet.place, "exec")
    if snippet.place.startswith("docs/design.md"):
        return  # it also draws what is still to be built
    imports = re.findall(r"^((?:from|import) shardwise\b.*)$", snippet.text, re.MULTILINE)
    exec("\n".join(line for line in imports if "(" not in line), {})
    import shardwise

    for name in re.findall(
        r"\bshardwise\.(\w+)", re.sub(r"^(?:from|import) .*$", "", snippet.text, flags=re.MULTILINE)
    ):
        assert hasattr(shardwise, name), f"{snippet.place} uses shardwise.{name}, which does not exist"


def run_as_script(text, words, directory):
    """Runs a snippet on a rank, as torchrun does; gives what it has found."""
    os.chdir(directory)
    sys.argv = ["train.py", *words]
    names = {"__name__": "__main__"}
    exec(compile(text, "train.py", "exec"), names)
    return {name: names.get(name) for name in ("first", "held_out_loss")} | {"loss": float(names["loss"].detach())}


OWN_LOOP = [each for each in snippets("python") if each.place.startswith("docs/own-loop.md")]


@pytest.mark.spawn
def test_the_script_of_a_loop_of_ones_own_goes_on_at_another_layout_as_in_one_process(tmp_path):
    import torch
    import transformers

    alone, split = tmp_path / "alone", tmp_path / "split"
    alone.mkdir(), split.mkdir()
    (whole,) = spawn(run_as_script, 1, OWN_LOOP[0].text, ["tp1", "6"], alone)
    spawn(run_as_script, 2, OWN_LOOP[0].text, ["fsdp2", "2"], split)
    for layout, first in (("tp2", 2), ("pp2", 4)):
        for found in spawn(run_as_script, 2, OWN_LOOP[0].text, [layout, f"{first + 2}"], split):
            assert found["first"] == first
    assert found == pytest.approx({**whole, "first": 4}, abs=1e-5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(split / "out")
    ids = (torch.arange(64 * 48).view(64, 48) % 999)[48:]
    assert float(plain(input_ids=ids, labels=ids).loss.detach()) == pytest.approx(found["held_out_loss"], abs=1e-5)


@pytest.mark.spawn
@pytest.mark.parametrize("snippet", OWN_LOOP[1:], ids=lambda s: s.place)
def test_the_other_loops_of_that_page_run(snippet, tmp_path):
    assert all(found["loss"] < 6 for found in spawn(run_as_script, 2, snippet.text, [], tmp_path))


@pytest.mark.parametrize(("command", "places"), commands_shown().items(), ids=list(commands_shown()))
def test_commands_shown_exist(command, places, capsys):
    from shardwise.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code, f"{places} show `shardwise {command}`:\n{capsys.readouterr().err}"


def test_commands_shown_have_the_options_that_they_need():
    """In blocks and in the text: the parser takes them, and `plan` and `verify` are told a layout."""
    from shardwise.cli.main import _parse

    shown = [line for document in DOCUMENTS for line in re.findall(r"`(shardwise \w+ .*?)`", document.read_text())]
    shown += [line for each in SHELL_SNIPPETS for line in each.text.replace("\\\n", " ").splitlines()]
    lines = [
        words for line in shown if (words := shlex.split(line.removeprefix("$ "), comments=True))[:1] == ["shardwise"]
    ]
    assert len(lines) > 30
    for words in lines:
        if len(words) > 2 and not words[2].startswith("-") and "..." not in words:
            arguments = _parse(words[1:])
            has_layout = getattr(arguments, "layout", "") is not None or arguments.model.endswith((".yaml", ".yml"))
            assert has_layout, words


def test_evaluations_shown_name_their_data():
    lines = [line for each in SHELL_SNIPPETS for line in each.text.splitlines() if "evaluate run.yaml" in line]
    assert lines and all("evaluation.path=" in line for line in lines), lines


def test_make_verbs_shown_exist():
    assert make_verbs_shown() <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_compile(path):
    compile(path.read_text(), path.name, "exec")


@pytest.mark.timeout(330)  # half a minute each where nothing else computes
@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name in PROGRAMS], ids=lambda p: p.name)
def test_examples_run_as_programs(path: Path, tmp_path: Path):
    """Where everything is proved, they import torch themselves."""
    script = [sys.executable, str(path)]
    run = (
        subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        if FULL_PRODUCT
        else run_script(path)
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert run.stdout.strip(), f"{path.name} shows nothing"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT 0.21, TRL 1.16
@pytest.mark.filterwarnings("ignore::shardwise.compat.warned.CompatWarning")  # of arguments that scripts for NxD give
@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name not in PROGRAMS | HEAVY], ids=lambda p: p.name)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch, capsys, run_forked):  # noqa: F811
    """As scripts, in this process: their ranks come from the process that all ranks of tests are forked from."""

    def train(words, *, cwd, check):
        assert words[1:4] == ["-m", "shardwise", "train"] and check
        monkeypatch.chdir(cwd)
        assert run_forked(*words[4:]) == 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.syspath_prepend(path.parent)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip(), f"{path.name} shows nothing"
