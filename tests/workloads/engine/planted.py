"""Plants a fault in the engine for as long as a test asks: other text in one function's source, or another constant."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """``place`` is "module:name" or "module:Class.method". With ``old``, a piece of its source becomes ``new``; without
    it, the name is a constant whose value becomes ``new``."""

    what: str
    place: str
    new: Any
    old: str | None = None

    def __str__(self) -> str:
        return self.what


@contextmanager
def planted(fault: Fault | None) -> Iterator[None]:
    """Run with the fault in this process, also where other modules have imported the name. None: without any."""
    if fault is None:
        yield
        return
    module_name, path = fault.place.split(":")
    module: Any = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    right = getattr(owner, name)
    wrong = fault.new if fault.old is None else _rewritten(right, name, fault.old, fault.new, vars(module))
    holders = [
        owner,
        *(m for m in _our_modules() if owner is module and m is not module and vars(m).get(name) is right),
    ]
    for holder in holders:
        setattr(holder, name, wrong)
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, name, right)


def with_fault(rank: int, fault: Fault | None, body: Callable[..., Any], *args: Any) -> Any:
    """``body(rank, *args)`` with the fault planted, in a worker of a pool."""
    with planted(fault):
        return body(rank, *args)


def _rewritten(function: Any, name: str, old: str, new: str, scope: dict[str, Any]) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has changed: {old!r} is in it {source.count(old)} times"
    made: dict[str, Any] = {}
    exec(source.replace(old, new), scope, made)
    return made[name]


def _our_modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.split(".")[0] in ("workloads", "tests")]
