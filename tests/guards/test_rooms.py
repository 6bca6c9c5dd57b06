"""The map is true."""

from __future__ import annotations

import pytest

from tests.guards.rooms import MAP, ORDER, SOURCE, written

pytestmark = pytest.mark.pure


def test_the_map_names_every_file_as_it_says_itself_what_it_is():
    assert MAP.read_text(encoding="utf-8") == written(), "run `make fix`"


def test_the_map_knows_every_room():
    places = {each.name for each in SOURCE.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()}
    assert places - set(ORDER) <= {"__init__.py", "__main__.py"} and set(ORDER) <= places
