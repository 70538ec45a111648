"""The agent of one node: forks ranks for its pilot, reports how they end, and proves that none of their processes is
left.

The agent has imported torch but never touched CUDA, and has one thread, so that it can fork a rank in milliseconds. It
exchanges JSON lines with the pilot over one connection. When the connection closes, or the pilot has been silent for
too long (the network is cut), the agent kills every rank and exits: no rank outlives the pilot that watches it.

    pilot → agent   {"request": 7, "do": "start" | "stacks" | "end" | "port" | "free", ...}   and {} as keep-alive
    agent → pilot   {"answer": 7, ...}   {"exit": {...}, "group": "a1"}   {"beats": [...], "group": "a1"}
                    {"hello": {...}} or {"refused": "why"}

    start   fork these ranks                       end    kill all ranks of a group, and report what is left
    stacks  have ranks write down their stacks     port   reserve a port for the rendezvous
    free    wait until device memory is free

Ranks write their heartbeats to memory that they share with the agent (`workloads.contract.beats`). Every
`BEATS_EVERY_S` seconds the agent sends one message for each group with a changed heartbeat: ``beats`` lists the latest
heartbeat of every rank that has one, with the fields and units of `workloads.contract.beats.Heartbeat`. So a node sends
at most five such messages a second, of about 120 bytes per rank, however often its ranks beat, and none while nothing
changes. A rank's last heartbeats are sent before its exit, or with the answer to ``end``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from launchers.node import fork, ports
from launchers.node.connection import KEEPALIVE_S, SILENCE_LIMIT_S, JsonLines
from launchers.node.devices import Devices, open_devices
from launchers.node.fork import RunRank
from launchers.node.rank_group import LocalRanks
from launchers.settings import LaunchSettings
from results.errors import UltrasweepError
from workloads.rules.installed_packages import require_torch

_POLL_S = 0.02
_IDLE_S = 0.5
BEATS_EVERY_S = 0.2
"""Seconds between two checks of the heartbeats of this node's ranks."""


class Agent:
    """The agent of one node; `serve` returns when the pilot has disconnected."""

    def __init__(self, connection: socket.socket, name: str, devices: Devices, run_rank: RunRank) -> None:
        self._lines = JsonLines(connection)
        self._name = name
        self._devices = devices
        self._run_rank = run_rank
        self._groups: dict[str, LocalRanks] = {}
        self._port: contextlib.ExitStack | None = None
        self._heard_at = self._sent_at = time.monotonic()
        self._next_beats_at = 0.0
        self._handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "start": self._start,
            "stacks": self._stacks,
            "end": self._end,
            "port": self._reserve_port,
            "free": self._free,
        }

    def serve(self, silence_limit_s: float | None) -> None:
        """Answer requests until the connection closes, or the pilot has sent nothing for ``silence_limit_s`` seconds
        (None: no limit)."""
        try:
            hello = {"name": self._name, "device_ids": self._devices.ids, "notes": self._devices.notes()}
            self._send({"hello": {**hello, "threads": _threads(), "pid": os.getpid()}})
            while True:
                busy = any(group.running for group in self._groups.values())
                ready, _, _ = select.select([self._lines.connection], [], [], _POLL_S if busy else _IDLE_S)
                if ready:
                    messages = self._lines.receive()
                    if messages is None:
                        return
                    self._heard_at = time.monotonic()
                    for message in messages:
                        self._answer(message)
                        self._heard_at = time.monotonic()  # messages that arrived in the meantime are not read yet
                self._report_beats()
                self._report_exits()
                self._keep_alive()
                if silence_limit_s is not None and time.monotonic() - self._heard_at > silence_limit_s:
                    print(
                        f"agent {self._name}: no message from the pilot for {silence_limit_s:.0f} s; killing all ranks"
                    )
                    return
        except OSError:
            return  # the pilot disconnected while we were sending
        finally:
            for group in self._groups.values():
                group.end()

    def _answer(self, message: dict[str, Any]) -> None:
        if "do" not in message:
            return
        try:
            answer = self._handlers[message["do"]](message)
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        self._send({"answer": message["request"], **answer})

    def _start(self, message: dict[str, Any]) -> dict[str, Any]:
        group = self._groups[message["group"]] = LocalRanks()
        folder = Path(message["folder"])
        for rank, local_rank in message["ranks"]:
            try:
                group.fork(folder, rank, local_rank, message["environment"], self._run_rank)
            except OSError as error:  # no more processes or memory
                return {"error": f"rank {rank} could not be started: {error}", "rank": rank}
        return {}

    def _stacks(self, message: dict[str, Any]) -> dict[str, Any]:
        if (group := self._groups.get(message["group"])) is not None:
            group.request_stacks(message["ranks"])
        return {}

    def _end(self, message: dict[str, Any]) -> dict[str, Any]:
        group = self._groups.pop(message["group"], None)
        self._release_port()
        if group is None:
            return {"survivors": [], "exits": [], "beats": [], "host_oom_kills": 0}
        exits, survivors = group.end()
        return {
            "survivors": survivors,
            "exits": [dataclasses.asdict(e) for e in exits],
            "beats": [dataclasses.asdict(b) for b in group.new_beats()],
            "host_oom_kills": group.host_oom_kills(),
        }

    def _reserve_port(self, message: dict[str, Any]) -> dict[str, Any]:
        self._release_port()
        self._port = contextlib.ExitStack()
        return {"port": self._port.enter_context(ports.reserve_port())}

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def _free(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"held": self._devices.wait_until_free(message["count"], message["limit_s"], self._keep_alive)}

    def _report_beats(self) -> None:
        now = time.monotonic()
        if now >= self._next_beats_at:
            self._next_beats_at = now + BEATS_EVERY_S
            for name, group in self._groups.items():
                self._send_beats(name, group)

    def _send_beats(self, name: str, group: LocalRanks) -> None:
        if beats := group.new_beats():
            self._send({"beats": [dataclasses.asdict(beat) for beat in beats], "group": name})

    def _report_exits(self) -> None:
        for name, group in self._groups.items():
            exits = group.poll()
            if exits:
                self._send_beats(name, group)
            for exit_ in exits:
                self._send({"exit": dataclasses.asdict(exit_), "group": name})

    def _keep_alive(self) -> None:
        if time.monotonic() - self._sent_at > KEEPALIVE_S:
            self._send({})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._lines.send(message)
        self._sent_at = time.monotonic()


def fork_agent(settings: LaunchSettings, name: str, run_rank: RunRank | None) -> tuple[int, socket.socket]:
    """Start the agent of this machine as a child of this process, which must have no threads yet. Returns the agent's
    pid and this process's end of the connection."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()  # signals that a terminal or Slurm sends to the pilot's process group are for the pilot alone
        run_agent(theirs, settings, name, run_rank, silence_limit_s=None)
    theirs.close()
    return pid, ours


def run_agent(
    connection: socket.socket,
    settings: LaunchSettings,
    name: str,
    run_rank: RunRank | None,
    *,
    silence_limit_s: float | None = SILENCE_LIMIT_S,
) -> NoReturn:
    """Run as the agent of this machine until the pilot has disconnected, then exit. ``run_rank``: None for the
    engine's."""
    status = 0
    try:
        # Slurm signals every process of a step, but only the pilot decides how to react.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        # CUDA and torch read these variables here and in the ranks. The agent must not ask CUDA for devices, because it
        # could not fork ranks afterwards.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        fork.become_subreaper()
        try:
            if run_rank is None:
                require_torch("the engine")
            devices = open_devices(settings.device, settings.num_devices)
        except UltrasweepError as error:
            JsonLines(connection).send({"refused": str(error)})
            os._exit(2)
        if run_rank is None:
            from workloads import worker

            worker.preload()
            run_rank = worker.run_rank
        gc.collect()
        gc.freeze()  # the ranks share the memory of loaded modules: their garbage collector does not touch it
        Agent(connection, name, devices, run_rank).serve(silence_limit_s)
    except BaseException as error:
        print(f"agent {name}: {type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
