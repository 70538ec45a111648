"""The connection between a pilot and the agents of its nodes."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from launchers.node import fork
from launchers.node.agent import Agent
from launchers.node.connection import HeadAddress, JsonLines
from launchers.node.ports import NoFreePort
from launchers.node.remote import Node
from launchers.pilot import agent_server
from launchers.pilot.agent_server import AgentServer
from workloads.contract import protocol


class SlowDevices:
    """Devices whose memory takes some time to become free."""

    ids = None

    def notes(self) -> list[str]:
        return []

    def wait_until_free(self, count: int, limit_s: float, meanwhile: Callable[[], None]) -> None:
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            meanwhile()
            time.sleep(0.01)


@pytest.mark.slow
def test_a_long_request_is_no_silence() -> None:
    """The pilot has sent keep-alives all the time; the busy agent could not read them."""
    theirs, ours = socket.socketpair()
    agent: Any = Agent(theirs, "n", SlowDevices(), None)  # type: ignore[arg-type]
    serving = threading.Thread(target=agent.serve, args=(1.0,), daemon=True)
    serving.start()
    lines = JsonLines(ours)
    lines.send({"request": 0, "do": "free", "count": 1, "limit_s": 2.0})
    for _ in range(30):
        lines.send({})
        time.sleep(0.1)
    assert serving.is_alive()
    ours.close()
    serving.join(5.0)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"null\n", b"[1]\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000 + b"\n", b"{}\n"])
def test_data_from_another_program_ends_only_its_own_connection(sent: bytes) -> None:
    server = AgentServer(threading.Event())
    port = server.listen().port
    server.start()
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert server.is_alive()
    server.close()


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeadAddress]:
    """The address of a running server with few connections and short pauses."""
    monkeypatch.setattr(agent_server, "MOST_STRANGERS", 3)
    monkeypatch.setattr(agent_server, "_PAUSE_S", 0.2)
    server = AgentServer(threading.Event())
    address = server.listen()
    server.start()
    yield address
    server.close()


def connected(head: HeadAddress) -> socket.socket:
    return socket.create_connection(("127.0.0.1", head.port), timeout=5.0)


def is_closed(connection: socket.socket, limit_s: float) -> bool:
    """Whether the other side closes the connection within the limit."""
    connection.settimeout(limit_s)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.slow
def test_a_connection_without_a_greeting_is_closed(head: HeadAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = connected(head)
    JsonLines(agent).send({"secret": head.secret, "name": "n1"})
    with connected(head) as silent, connected(head) as talkative, agent:
        talkative.sendall(b"x" * 5000)  # no message ends in the first 4096 bytes
        assert is_closed(talkative, 5.0)
        assert not is_closed(silent, 0.1)
        monkeypatch.setattr(agent_server, "GREETING_LIMIT_S", 0.0)
        assert is_closed(silent, 5.0)
        assert not is_closed(agent, 0.1)


@pytest.mark.slow
def test_only_so_many_connections_wait_for_their_greeting(head: HeadAddress) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(head)) for _ in range(5)]
        assert [is_closed(one, 1.0) for one in connections[:2]] == [True, True]
        assert [is_closed(one, 0.1) for one in connections[2:]] == [False, False, False]


@pytest.mark.slow
def test_a_listener_without_open_files_waits(monkeypatch: pytest.MonkeyPatch, head: HeadAddress) -> None:
    real, calls = socket.socket.accept, list[float]()

    def accept(listener: socket.socket) -> Any:
        calls.append(time.monotonic())
        if len(calls) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with connected(head) as agent:
        lines = JsonLines(agent)
        lines.send({"secret": "wrong", "name": "n1"})
        assert is_closed(agent, 5.0)  # it was accepted in the end
    assert len(calls) == 3 and calls[2] - calls[0] > 0.3


def test_a_node_without_a_free_port_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _theirs = socket.socketpair()
    node = Node("n7", "here", None, JsonLines(ours))

    def answer(*_: object, **__: object) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        future.set_result({"error": "no free port among 10240 to 32767"})
        return future

    monkeypatch.setattr(node, "ask", answer)
    with pytest.raises(NoFreePort, match="node n7: no free port among"):
        node.reserve_port()


def test_a_rank_whose_log_cannot_be_opened_ends_as_one_that_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def quota(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith(".log"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", quota)
    pid = fork.fork_rank(tmp_path, 0, 0, {}, lambda *_: os._exit(0), lambda *_: None)
    until = time.monotonic() + 10.0
    while (exits := fork.poll_exit(0, pid, killed_by_us=False)) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert exits is not None and exits.status == protocol.CANNOT_WRITE
