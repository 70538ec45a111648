"""Work on a frame that several figures and sentences ask for, done once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

import pandas as pd

P = ParamSpec("P")
T = TypeVar("T")
_DEEP = int(pd.__version__.partition(".")[0]) < 3
"""Whether only a deep copy keeps a writer from changing what others see."""


def cache_per_frame(
    function: Callable[Concatenate[pd.DataFrame, P], T],
) -> Callable[Concatenate[pd.DataFrame, P], T]:
    """Keep the last result of a function of a frame (and of what is given after it) while that frame lives.

    For functions of the rows alone, which nobody changes in place. A frame is given out as a
    copy that shares its data until somebody writes to it (before pandas 3, one that shares nothing).
    """
    kept: tuple[weakref.ref[pd.DataFrame], object, T] | None = None

    @functools.wraps(function)
    def remembering(frame: pd.DataFrame, /, *more: P.args, **named: P.kwargs) -> T:
        nonlocal kept
        if kept is None or kept[0]() is not frame or kept[1] != (more, named):
            kept = weakref.ref(frame), (more, named), function(frame, *more, **named)
        found = kept[2]
        return cast(T, found.copy(deep=_DEEP)) if isinstance(found, pd.DataFrame) else found

    return remembering
