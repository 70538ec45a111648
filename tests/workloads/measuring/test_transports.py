"""Transports are read from NCCL's log, wherever it is written."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from workloads.measuring.transports import record_log, transports, transports_in

LINES = """\
gpu1:70:99 [0] NCCL INFO Channel 00/02 : 0 1 2 3
gpu1:70:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu1:70:99 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct
gpu1:70:99 [0] NCCL INFO Channel 02/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
gpu1:70:99 [0] NCCL INFO Channel 03/0 : 0[0] -> 2[0] [send] via NET/IB/3(2)/GDRDMA
gpu1:70:99 [0] NCCL INFO Channel 04/0 : 0[0] -> 2[0] [send] via NET/AWS Libfabric/7/GDRDMA/Shared
gpu1:70:99 [0] NCCL INFO Channel 05/0 : 0[0] -> 2[0] [send] via NET/IB/0
"""


def test_transports_are_named_once_without_numbers_of_cards() -> None:
    assert transports(LINES) == [
        "NET/AWS Libfabric/GDRDMA",
        "NET/IB",
        "NET/IB/GDRDMA",
        "NET/Socket",
        "P2P/CUMEM",
        "SHM/direct",
    ]
    assert transports("gpu1:70:99 [0] NCCL INFO Connected all rings\n") == []


def test_without_the_users_wish_the_log_is_kept_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # so that the variables are restored
        monkeypatch.delenv(name)
    log = record_log(tmp_path / "rank.log", {})
    assert log is not None and os.environ["NCCL_DEBUG"] == "INFO"
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(LINES)  # as NCCL opens it
    assert transports_in(log) == transports(LINES)
    assert list(tmp_path.iterdir()) == []


def test_a_users_own_log_is_left_where_it_is(tmp_path: Path) -> None:
    before = dict(os.environ)
    log = tmp_path / "rank.log"
    log.write_text(LINES)
    assert transports_in(record_log(log, {"NCCL_DEBUG": "info"})) == transports(LINES)
    named = record_log(log, {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/%h.%p"})
    assert named == tmp_path / f"{socket.gethostname()}.{os.getpid()}"
    assert transports_in(named) is None  # not there
    assert record_log(log, {"NCCL_DEBUG": "WARN"}) is None
    assert transports_in(None) is None
    assert dict(os.environ) == before
