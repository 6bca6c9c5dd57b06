"""The places that a run writes to are tried without harm to others that try them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwise.cli.places import check_place
from shardwise.errors import LoadError

pytestmark = pytest.mark.pure


def test_several_processes_may_try_the_same_place_at_once(tmp_path):
    place = str(tmp_path / "runs" / "latest")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: check_place(place), range(200)))
    assert not list(tmp_path.iterdir())


def test_a_place_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match="cannot write to"):
        check_place(str(tmp_path / "file" / "log"))
