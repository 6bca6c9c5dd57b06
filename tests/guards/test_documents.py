"""What we show must be true: snippets compile, commands exist, examples run."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards.sources import DOCUMENTS, PACKAGE, ROOT, name_of, snippets

pytestmark = pytest.mark.single

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HEAVY = {"demo.py"}  # minutes long: `make demo` runs it
SHELL_SNIPPETS = snippets("bash", "sh", "shell", "console")


def commands_shown():
    """(place, subcommand) of every `shardwise ...` line in a shell snippet."""
    found = []
    for snippet in SHELL_SNIPPETS:
        for line in snippet.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["shardwise"] and len(words) > 1 and not words[1].startswith("-"):
                found.append((snippet.place, words[1]))
    return found


def make_verbs_shown():
    return sorted({verb for s in SHELL_SNIPPETS for verb in re.findall(r"^\$? ?make ([a-z]+)", s.text, re.MULTILINE)})


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


@pytest.mark.parametrize(("place", "command"), commands_shown())
def test_commands_shown_exist(place, command):
    script = [sys.executable, "-m", "shardwise", command, "--help"]
    run = subprocess.run(script, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, f"{place} shows `shardwise {command}`:\n{run.stderr}"


@pytest.mark.skipif(not (PACKAGE / "cli" / "main.py").exists(), reason="no command line yet")
def test_an_unknown_command_is_refused():
    script = [sys.executable, "-m", "shardwise", "trian"]
    run = subprocess.run(script, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode != 0, "otherwise the test above cannot fail"
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("verb", make_verbs_shown())
def test_make_verbs_shown_exist(verb):
    assert re.search(rf"^{verb}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_to_files_lead_somewhere(path):
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_compile(path):
    compile(path.read_text(), path.name, "exec")


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name not in HEAVY], ids=lambda p: p.name)
def test_examples_run_in_under_a_minute(path: Path, tmp_path: Path):
    """Of processor time: tests beside this one may take the other half of a core."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    assert run.stdout.strip(), f"{path.name} shows nothing"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
