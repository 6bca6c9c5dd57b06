"""What a rank's last beat says of how it ended."""

from __future__ import annotations

import pytest

from shardwise.job import processes

pytestmark = pytest.mark.single


@pytest.mark.parametrize(
    ("code", "words"), [(143, "it was ended by SIGTERM"), (255, "SystemExit: 255"), (1, "SystemExit: 1")]
)
def test_an_exit_code_is_a_signal_only_where_there_is_such_a_signal(code, words):
    assert processes._in_words(SystemExit(code)) == words
