"""Finds `sweep` as the scripts of bench/ do, and forgets it afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def _bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "sweep"]:
        del sys.modules[name]
