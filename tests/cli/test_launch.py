"""Of several failures the first is shown, as the user should see it."""

from __future__ import annotations

import errno
import json
import signal
from pathlib import Path

import pytest

from shardwise.cli import launch
from shardwise.errors import BatchError

pytestmark = pytest.mark.single


@pytest.fixture
def left(monkeypatch):
    """The exit codes with which ranks would have left."""
    codes = []
    monkeypatch.setattr(launch, "leave", codes.append)
    return codes


def record(path, error, monkeypatch):
    monkeypatch.setenv(launch.ERROR_FILE, str(path))
    with launch.record_failures():
        raise error
    return launch._read_failures(path.parent)[int(path.name)]


def test_the_earliest_failure_is_shown_without_its_traceback(tmp_path, monkeypatch, left):
    second = record(tmp_path / "1", BatchError("no rows", fix="more rows"), monkeypatch)
    first = record(tmp_path / "0", BatchError("too late"), monkeypatch)
    assert left == [1, 1]
    shown = json.loads((tmp_path / "1").read_text())["message"]["extraInfo"]["py_callstack"]
    assert shown == "error: no rows\n  fix: more rows", "what torchrun shows last"
    text = launch._describe({0: 1, 1: 1, 2: -signal.SIGTERM}, {0: first, 1: second}, show_traceback=False)
    assert text == "error: no rows\n  fix: more rows"
    text = launch._describe({0: 1, 1: 1}, {0: first, 1: second}, show_traceback=True)
    assert text.startswith("rank 1 failed first:\nTraceback") and "BatchError: no rows" in text


def test_an_unforeseen_error_always_comes_with_its_traceback(tmp_path, monkeypatch, left):
    failure = record(tmp_path / "0", KeyError("surprise"), monkeypatch)
    text = launch._describe({0: 1}, {0: failure}, show_traceback=False)
    assert text.startswith("rank 0 failed first:\nTraceback") and text.endswith("KeyError: 'surprise'")


def test_a_rank_that_could_not_report_comes_before_those_that_did(tmp_path, monkeypatch, left):
    failure = record(tmp_path / "0", RuntimeError("connection closed"), monkeypatch)
    text = launch._describe({0: 1, 1: -signal.SIGSEGV}, {0: failure}, show_traceback=False)
    assert text == "error: rank 1 was ended by SIGSEGV"
    text = launch._describe({0: 128 + signal.SIGTERM, 1: -signal.SIGKILL}, {}, show_traceback=False)
    assert text.startswith("error: rank 1 was ended by SIGKILL")


def test_a_failure_is_recorded_whole_or_not_at_all_and_stays(tmp_path, monkeypatch, left):
    path = tmp_path / "0"
    write = Path.write_text

    def fail_half_way(self, text, **options):
        write(self, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv(launch.ERROR_FILE, str(path))
    with monkeypatch.context() as full, launch.record_failures():
        full.setattr(Path, "write_text", fail_half_way)
        raise BatchError("no rows")
    assert launch._read_failures(tmp_path) == {}, "and nothing that cannot be read"
    first = record(path, BatchError("no rows"), monkeypatch)
    assert record(path, launch.TerminatedError("rank 0 was ended"), monkeypatch) == first


def test_ranks_leave_with_the_code_of_what_ended_them(monkeypatch, left):
    monkeypatch.delenv(launch.ERROR_FILE, raising=False)
    for error in (KeyboardInterrupt(), SystemExit(143)):
        with launch.record_failures():
            raise error
    assert left == [130, 143]
    with pytest.raises(KeyError), launch.record_failures():
        raise KeyError("no launcher asked, so it takes its usual way")


def test_under_torchrun_a_rank_prints_its_error_because_torchrun_may_not(tmp_path, monkeypatch, left, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    record(tmp_path / "0", BatchError("no rows", fix="more rows"), monkeypatch)
    assert capsys.readouterr().err == "error: no rows\n  fix: more rows\n"
    record(tmp_path / "1", KeyError("surprise"), monkeypatch)
    assert "Traceback" in (err := capsys.readouterr().err) and "KeyError: 'surprise'" in err
