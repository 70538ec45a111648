"""Plants a fault in the engine for as long as it is asked to: other text in one function, or another constant."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_OURS = ("workloads", "sweep", "tests")
"""Folders whose modules may have imported a function that is planted in another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``place`` is "module:name" or "module:Class.method". With ``old``, a piece of its source becomes ``new``; without
    it, the name is a constant whose value becomes ``new``."""

    name: str
    what: str
    axis: str
    place: str
    new: Any
    old: str | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `tests.workloads.engine.parity.experiment`: a layout that meets the fault."""
    check: str = "parity"
    """The check that must find it: `parity` (losses, gradient norms, gradients and weights of ``layout`` are those of
    the unsharded model) or a function of `tests.planted.checks`."""
    steps: int = 1
    """How many it takes to show."""
    scale: float = 1.0
    """Multiplies the gradients before they are clipped."""

    def __str__(self) -> str:
        return self.name


class CannotBePlanted(RuntimeError):
    """The code that a fault changes is not there. No `AssertionError`, so that no check seems to have found it."""


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
    kept = vars(owner)[name]  # a static method as such
    wrong = fault.new if fault.old is None else _rewritten(right, name, fault.old, fault.new, vars(module), owner)
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
            setattr(holder, name, kept)


def with_fault(rank: int, fault: Fault | None, body: Callable[..., Any], *args: Any) -> Any:
    """``body(rank, *args)`` with the fault planted, in a worker of a pool."""
    with planted(fault):
        return body(rank, *args)


def _rewritten(function: Any, name: str, old: str, new: str, scope: dict[str, Any], owner: Any) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise CannotBePlanted(f"{name} has changed: {old!r} is in it {source.count(old)} times")
    made: dict[str, Any] = {}
    # The name __class__ in an enclosing function is what super() without arguments looks for.
    body = textwrap.indent(source.replace(old, new), "    ")
    exec(f"def make(__class__):\n{body}\n    return {name}\n", scope, made)
    return made["make"](owner)


def _our_modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.split(".")[0] in _OURS]
