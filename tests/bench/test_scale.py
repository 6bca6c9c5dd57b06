"""What a large job computes on its hosts stays within its measure."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.single


def test_a_thousand_ranks_divide_save_and_load_a_model_of_a_hundred_tensors(monkeypatch, capsys):
    import scale

    monkeypatch.setattr(sys, "argv", ["scale.py", "--layers", "11", "--documents", "20000"])
    assert scale.main() == 0
    out = capsys.readouterr().out
    assert "102 parameters" in out and "documents" in out
