"""Processor seconds of every test, children and ranks included: `python -m pytest -p tests.cost ...`, `make cost`.

Wall time says little on a machine that others use too. Tests that share ranks or a fixture are told apart by file only:
ranks are counted when they end, with the last test that they run. `SHARDWISE_COST=file` adds a line there as each test
ends.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

SHOWN = 40
_seconds: dict[str, float] = {}
_workers: list[float] = []
_START = pytest.StashKey[float]()


def spent() -> float:
    """Processor seconds of this process, of the children it has waited for, and of the ranks that have ended."""
    ours = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in ours) + _fork_server()


def _fork_server() -> float:
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    try:
        stat = Path(f"/proc/{server._forkserver_pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    ticks = stat.rpartition(")")[2].split()[11:15]  # user and system, of itself and of the ranks it has waited for
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_START] = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if report.when == "teardown":
        report.user_properties.append(("processor_seconds", spent() - item.stash[_START]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the controller counts
    if report.when == "teardown":
        seconds: Any = dict(report.user_properties).get("processor_seconds", 0.0)
        _seconds[report.nodeid] = seconds
        if path := os.environ.get("SHARDWISE_COST"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(f"{seconds:8.2f} {report.nodeid}\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["processor_seconds"] = spent()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _workers.append(getattr(node, "workeroutput", {}).get("processor_seconds", 0.0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    config = terminalreporter.config
    if hasattr(config, "workeroutput"):
        return
    files = Counter[str]()
    for test, seconds in _seconds.items():
        files[test.split("::")[0]] += seconds
    total = sum(_workers) or spent()
    terminalreporter.section(f"processor seconds: {total:.0f}, {sum(files.values()):.0f} of them in tests")
    for file, seconds in files.most_common(SHOWN):
        terminalreporter.write_line(f"{seconds:8.1f}  {file}")
