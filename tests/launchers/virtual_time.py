"""`World`: a virtual clock for threads that take turns, so that an hour passes as fast as the code between two sleeps.

A run gives the same result again and does not depend on how busy the machine is.
Each simulated process has one or more actors, which are threads. Exactly one actor runs at a time. It runs until it
sleeps; then the actor or the callback with the earliest time goes on. `time.time`, `time.monotonic` and `time.sleep`
are replaced for actors; all other threads keep the real ones. A process that is killed is never given its turn again:
none of its handlers runs, as with SIGKILL.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

_REAL_TIME, _REAL_MONOTONIC, _REAL_SLEEP = time.time, time.monotonic, time.sleep


@dataclass(eq=False, slots=True)
class Process:
    """One simulated process, on one machine."""

    name: str
    host: str
    spared: bool = False
    """Whether its calls on files never fail."""
    dead: bool = False
    frozen_until: float = 0.0
    """Virtual time until which none of its actors runs, as after SIGSTOP."""
    dies_in: int | None = None
    """Number of calls on files after which it is killed in the middle of such a call."""
    freezes_in: int | None = None
    """The same for being frozen, for `freeze_s` seconds."""
    freeze_s: float = 0.0
    hangs_in: int | None = None
    """The same for a call that returns after ``hang_s`` seconds, while the other actors of the process go on."""
    hang_s: float = 0.0
    on_death: Callable[[], None] = lambda: None

    def kill(self) -> None:
        """SIGKILL."""
        if not self.dead:
            self.dead = True
            self.on_death()


@dataclass(eq=False, slots=True)
class Actor:
    """One thread of a process."""

    process: Process
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: bool = False


class World:
    """The clock, and whose turn it is. The thread that makes it is an actor as well.

    ``shortest_sleep_s``: a shorter `time.sleep` takes this long, so that loops which poll fifty times a second poll
    four times. ``spread``: by which share, at most, a `time.sleep` is longer or shorter than asked for.
    """

    def __init__(self, seed: int, *, now: float = 1000.0, shortest_sleep_s: float = 0.25, spread: float = 0.1) -> None:
        self.random = random.Random(seed)
        self.now = now
        self.epoch = float(int(_REAL_TIME())) - now
        self._shortest_sleep_s, self._spread = shortest_sleep_s, spread
        self.offsets: dict[str, float] = {}
        """Errors of the machines' clocks in seconds, by host."""
        self._queue: list[tuple[float, int, Actor | Callable[[], None]]] = []
        self._count = itertools.count()
        self._local = threading.local()
        self._local.actor = Actor(Process("the test", "login", spared=True))

    @property
    def actor(self) -> Actor | None:
        """The actor that runs in this thread; None in a thread of another kind, and in a callback."""
        return getattr(self._local, "actor", None)

    def at(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` in ``delay_s`` seconds. It must not sleep."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), callback))

    def start(self, process: Process, run: Callable[[], None], delay_s: float = 0.0) -> Actor:
        """A new thread of ``process`` that starts in ``delay_s`` seconds."""
        actor = Actor(process)

        def body() -> None:
            actor.turn.acquire()
            self._local.actor = actor
            try:
                self._wait_while_frozen(actor)
                run()
            finally:
                actor.done = True
                self._pass_on(None)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), actor))
        return actor

    def run(self, *programs: Callable[[], None]) -> None:
        """Run each program as a process of its own until all have ended or one has failed; its error is raised."""
        waiting, errors = self.actor, list[BaseException]()
        assert waiting is not None
        left = len(programs)

        def to_its_end(program: Callable[[], None]) -> None:
            nonlocal left
            try:
                program()
            except BaseException as error:
                errors.append(error)
            left -= 1
            if left == 0 or len(errors) == 1:
                heapq.heappush(self._queue, (self.now, next(self._count), waiting))

        for number, program in enumerate(programs):
            self.start(Process(f"program {number}", "login"), partial(to_its_end, program))
        self._pass_on(waiting)
        if errors:
            raise errors[0]

    def sleep(self, seconds: float) -> None:
        """Let the others run for ``seconds``."""
        actor = self.actor
        assert actor is not None
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), actor))
        self._pass_on(actor)
        self._wait_while_frozen(actor)

    def never_again(self) -> None:
        """Give the turn away for ever: the process of this actor has been killed."""
        self._pass_on(self.actor)

    def _wait_while_frozen(self, actor: Actor) -> None:
        while actor.process.frozen_until > self.now:
            left = actor.process.frozen_until - self.now
            heapq.heappush(self._queue, (self.now + left, next(self._count), actor))
            self._pass_on(actor)

    def _pass_on(self, actor: Actor | None) -> None:
        """Give the turn to whoever is next, and wait for the own turn, if there is one."""
        while True:
            when, _, following = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            if not isinstance(following, Actor):
                self._local.actor, before = None, actor
                try:
                    following()
                finally:
                    self._local.actor = before
            elif following is actor and not actor.process.dead:
                return
            elif not following.process.dead:
                following.turn.release()
                break
        if actor is not None:
            actor.turn.acquire()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give the virtual clock to all actors inside the block."""
        ours = self._ours
        time.time = lambda: self.time() if ours() else _REAL_TIME()
        time.monotonic = lambda: self.now if ours() else _REAL_MONOTONIC()
        time.sleep = lambda seconds: self._sleep(float(seconds)) if self.actor else _REAL_SLEEP(seconds)
        try:
            yield
        finally:
            time.time, time.monotonic, time.sleep = _REAL_TIME, _REAL_MONOTONIC, _REAL_SLEEP

    def time(self) -> float:
        """The time of day on the running actor's machine."""
        actor = self.actor
        return self.epoch + self.now + (self.offsets.get(actor.process.host, 0.0) if actor is not None else 0.0)

    def _ours(self) -> bool:
        return hasattr(self._local, "actor")

    def _sleep(self, seconds: float) -> None:
        self.sleep(max(seconds, self._shortest_sleep_s) * self.random.uniform(1 - self._spread, 1 + self._spread))


class VirtualEvent(threading.Event):
    """Replaces `threading.Event` for the actors of one process: a wait looks only when its time is over.

    ``longest_s``: most seconds by which a wait is longer than its caller asks, if nothing happens meanwhile. Programs
    that look many times a second then change threads less often.
    """

    def __init__(self, world: World, longest_s: float = 0.0) -> None:
        super().__init__()
        self.next_at = 0.0
        """When something happens, as far as is known."""
        self._world, self._longest_s = world, longest_s

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``timeout`` seconds, or up to ``longest_s`` if nothing happens before; not if the event is set."""
        assert timeout is not None
        seconds = max(timeout, min(self.next_at - self._world.now, self._longest_s))
        if not self.is_set() and seconds > 0:
            time.sleep(seconds)
        return self.is_set()


class ActorThread:
    """Replaces `threading.Thread` where a process starts an actor."""

    def __init__(self, world: World, *, target: Callable[[], None], **_: Any) -> None:
        self._world, self._target = world, target
        self._actor: Actor | None = None

    def start(self) -> None:
        parent = self._world.actor
        assert parent is not None
        self._actor = self._world.start(parent.process, self._target)

    def is_alive(self) -> bool:
        assert self._actor is not None
        return not self._actor.done
