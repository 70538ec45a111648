"""One list of errors decides whether a call is repeated, and what the text of an error names."""

from __future__ import annotations

import errno
import os

import pytest

from results.shared_filesystem.passing_errors import FAILING, LACKING, names_passing_error
from results.shared_filesystem.patience import may_pass


def test_pilots_wait_for_what_a_rank_may_have_died_of() -> None:
    for number in FAILING | LACKING:
        error = OSError(number, os.strerror(number), "/shared/results/a")
        assert names_passing_error(f"Traceback:\n  File 'x.py', line 1\nOSError: {error}")
        assert may_pass(error) == (number in FAILING)


@pytest.mark.parametrize(
    ("text", "passing"),
    [
        ("RuntimeError: write failed: stale FILE handle", True),
        ("[Errno 104] Connection reset by peer", False),
        ("ConnectionError: [Errno 110] Connection timed out", False),
        ("gloo: getpeername: Transport endpoint is not connected", False),
        (str(OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))), False),
        ("open 'a/b'\nOSError: [Errno 107] Transport endpoint is not connected", False),
        ("[Errno 12] Cannot allocate memory: '/shared/a'", False),
    ],
)
def test_an_error_of_a_socket_is_none_of_a_file_system(text: str, passing: bool) -> None:
    assert names_passing_error(text) == passing
