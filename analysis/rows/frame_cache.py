"""Cache of what several figures, claims and sentences compute from the same frame."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

import pandas as pd

P = ParamSpec("P")
T = TypeVar("T")
_DEEP = int(pd.__version__.partition(".")[0]) < 3
"""Whether a deep copy is needed so that a writer does not change what other readers see."""
_MOST = 12
"""Number of results kept for one function: enough for every cohort of a usual report and the frames derived from
them."""


def cache_per_frame(
    function: Callable[Concatenate[pd.DataFrame, P], T],
) -> Callable[Concatenate[pd.DataFrame, P], T]:
    """Cache the last `_MOST` results of a function of a frame and further arguments, while the frames are alive.

    The function must depend only on the rows, and no caller may change them in place. A cached frame is returned as a
    copy that shares its data until it is written to (before pandas 3, a full copy).
    """
    kept: list[tuple[weakref.ref[pd.DataFrame], object, T]] = []
    """Cached entries (frame, other arguments, result), most recently used first."""

    @functools.wraps(function)
    def remembering(frame: pd.DataFrame, /, *more: P.args, **named: P.kwargs) -> T:
        for index, entry in enumerate(kept):
            if entry[0]() is frame and entry[1] == (more, named):
                del kept[index]
                break
        else:
            entry = (weakref.ref(frame), (more, named), function(frame, *more, **named))
        kept[:] = [entry, *(other for other in kept if other[0]() is not None)][:_MOST]
        value = entry[2]
        return cast(T, value.copy(deep=_DEEP)) if isinstance(value, pd.DataFrame) else value

    return remembering
