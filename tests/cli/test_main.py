"""The command teaches, refuses what it does not know, and is light until it works."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
import zlib

import pytest

import shardwise
from shardwise.checkpoint.manifest import FileFacts, Manifest, write_manifest
from shardwise.cli.main import COMMANDS, main
from shardwise.cli.plan import _check_timeline, _draw_step
from shardwise.errors import ConfigError, RankError
from shardwise.plan.options import ParallelSpec
from shardwise.topology.shape import MeshShape
from shardwise.versions import SUPPORTED

pytestmark = pytest.mark.single


def refused(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_help_lists_every_command_with_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "examples:" in out
    assert all(f"\n    {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"\n  shardwise {command}" in capsys.readouterr().out


def test_train_help_explains_the_keys(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "optimizer.schedule.warmup_steps" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0 and lines[0] == f"shardwise {shardwise.__version__}"
    assert lines[1] == f"torch {importlib.metadata.version('torch')} (tested: {SUPPORTED['torch']})"
    assert lines[2].startswith(f"transformers {importlib.metadata.version('transformers')} (tested: ")


def test_misspelt_commands_and_options_get_a_suggestion(capsys):
    assert "did you mean 'train'" in refused(capsys, "trian")
    assert "did you mean '--nproc'" in refused(capsys, "train", "run.yaml", "--nprco=2")
    assert "unknown argument rest" in refused(capsys, "doctor", "rest")
    assert "arguments are required: CONFIG.yaml\n  fix: see `shardwise" in refused(capsys, "train")
    assert "keys of the run are written key=value, without dashes" in refused(
        capsys, "check", "run.yaml", "--optimizer.lr=1"
    )


def test_overrides_may_stand_on_either_side_of_options(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: x}\n")
    assert main(["train", str(path), "stps=1", "sede=1"]) == 1
    assert main(["train", str(path), "stps=1", "--nproc", "1", "sede=1"]) == 1
    err = capsys.readouterr().err
    assert err.count("did you mean 'steps'") == err.count("did you mean 'seed'") == 2


def test_errors_are_a_message_without_a_traceback_unless_asked_for(tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.yaml")]) == 1
    assert capsys.readouterr().err.startswith("error: cannot read the configuration file")
    with pytest.raises(shardwise.ShardwiseError):
        main(["train", str(tmp_path / "none.yaml"), "--traceback"])


def test_more_ranks_than_the_layout_needs_are_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"path": str(tmp_path)}, "data": {"path": str(tmp_path)}, "layout": "tp2"}))
    assert main(["train", str(path), "--nproc", "3"]) == 1
    assert "the layout tp2 needs 2 ranks" in capsys.readouterr().err
    assert main(["train", str(path), "--nproc", "0"]) == 1
    assert "but 0 are running" in capsys.readouterr().err


def test_the_command_starts_without_torch():
    code = "import sys, shardwise.cli.main; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--help", 0, "examples:"),
        ("--version", 0, "transformers "),
        ("train --help", 0, "optimizer.schedule.warmup_steps"),
        ("verify --help", 0, "shardwise verify run.yaml"),
        ("plan nowhere --layout tq2", 1, "unknown axis 'tq'"),
        ("verify nowhere --layout tq2", 1, "unknown axis 'tq'"),
        ("plan nowhere layout=tp2", 1, "not the YAML file of a run"),
        ("plan nowhere --layout tp2 --card 80", 1, "cannot read --card"),
        ("plan run.yaml", 1, "did you mean 'steps'?"),
        ("verify run.yaml", 1, "did you mean 'steps'?"),
        ("train run.yaml", 1, "did you mean 'steps'?"),
        ("check nowhere.yaml", 1, "cannot read the configuration file"),
        ("inspect nowhere", 1, "cannot look into"),
        ("inspect . --tensors", 0, "model/weight  [2] float32, 1 part"),
    ],
)
def test_what_needs_no_model_imports_no_torch(tmp_path, words, code, said):
    (tmp_path / "run.yaml").write_text("{model: {path: x}, data: {path: x}, stps: 1}")
    facts = {"dtype": "float32", "shape": [2], "layout": 0, "parts": [[0, 0, [[0, 2]]]]}
    layouts = [{"shape": [2], "steps": []}]
    index = {"files": ["a"], "tied": {}, "optimizer": None, "values": {}, "layouts": layouts}
    (tmp_path / "tensors.json").write_text(text := json.dumps({**index, "tensors": {"model/weight": facts}}))
    written = {"tensors.json": FileFacts(len(text), zlib.crc32(text.encode()))}
    about = {"number": 1, "tag": "step-1", "step": 1, "content": "all", "layout": "tp1", "model": "Linear"}
    write_manifest(tmp_path, Manifest(**about, time=0.0, versions={}, files=written))
    run = "import sys; from shardwise.cli.main import main\ntry: code = main(sys.argv[1:])\n"
    run += "except SystemExit as ended: code = ended.code\nprint(code, [m for m in ('torch',) if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", run, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == f"{code} []" and said in found.stdout + found.stderr


def test_the_doctor_finds_this_machine_well():
    run = subprocess.run([sys.executable, "-m", "shardwise", "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ok      2-rank all-reduce  sums over gloo: [3.0, 3.0]" in run.stdout
    assert "torch" in run.stdout and "hub cache" in run.stdout
    assert "numpy" in run.stdout and "torch.compile" in run.stdout


def test_the_doctor_names_what_is_broken(monkeypatch, capsys):
    from shardwise.ranks import spawn

    def fail(*arguments, **options):
        raise RankError("rank 0 failed", why="no route")

    monkeypatch.setattr(spawn, "spawn", fail)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["numpy>=99", "nothing-of-the-kind", "x; extra == 'y'"]
    )
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "broken  2-rank all-reduce  no route; if gloo" in out and "3 broken" in out
    assert "pip install -U 'numpy>=99'" in out and "not installed; pip install -U 'nothing-of-the-kind'" in out


COMMAND = """
import atexit, sys, threading, time
from shardwise.cli import main
atexit.register(lambda: print("handed in"))
threading.Thread(target=lambda: (time.sleep(0.3), print("written"))).start()
main.main = lambda: print("done") or 3
main.command()
"""


def test_the_command_ends_when_what_it_started_has_ended():
    run = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout.split("\n"), run.stderr) == (3, ["done", "written", "handed in", ""], "")


def test_a_reader_that_has_seen_enough_is_no_error():
    shown = f"{sys.executable} -m shardwise doctor | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=False, timeout=100)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("name", ["steps.svg", "steps.json"])
def test_a_step_of_the_pipeline_is_drawn(tmp_path, capsys, name):
    _draw_step(tmp_path / name, MeshShape(pp_size=2), ParallelSpec(), 4)
    assert "0F0" in capsys.readouterr().out
    assert "1B3" in (tmp_path / name).read_text()


@pytest.mark.parametrize(("name", "layout"), [("steps.png", "pp2"), ("steps.svg", "tp2")])
def test_what_cannot_be_drawn_is_an_error(tmp_path, name, layout):
    with pytest.raises(ConfigError, match="--timeline"):
        _check_timeline(tmp_path / name, MeshShape.parse(layout))


def test_a_drawing_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be written\n  at: .*\n  why: No such file"):
        _draw_step(tmp_path / "nowhere/steps.svg", MeshShape(pp_size=2), ParallelSpec(), 4)
