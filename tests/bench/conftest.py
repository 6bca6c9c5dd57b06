"""Finds the modules of bench/ as its scripts do, and forgets them afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
NAMES = {path.stem for path in BENCH.iterdir()}


@pytest.fixture(autouse=True)
def _bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in NAMES]:
        del sys.modules[name]
