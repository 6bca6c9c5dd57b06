"""Directories that a run writes to are checked, and not created."""

from __future__ import annotations

import pytest

from shardwise.cli.inputs import check_place
from shardwise.errors import LoadError

pytestmark = pytest.mark.single


def test_a_place_is_checked_and_not_created(tmp_path):
    check_place(str(tmp_path / "runs" / "latest"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "num_bytes", "why"), [("file/log", 0, "is a file"), ("s3://bucket", 0, "a URL"), ("a", 2**80, "free")]
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch, place, num_bytes, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match=f"cannot write to {place!r}\n  why: .*{why}"):
        check_place(place, num_bytes=num_bytes)
