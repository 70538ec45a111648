"""Keeps what several figures, claims and sentences compute from the same frame, so that it is computed once."""

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
_MOST = 12
"""So many results of one function are kept: of every cohort of a usual report, and of the frames made from it."""


def cache_per_frame(
    function: Callable[Concatenate[pd.DataFrame, P], T],
) -> Callable[Concatenate[pd.DataFrame, P], T]:
    """Keep the last results of a function of a frame (and of what is given after it) while those frames live.

    For functions of the rows alone, which nobody changes in place. A frame is given out as a
    copy that shares its data until somebody writes to it (before pandas 3, one that shares nothing).
    """
    kept: list[tuple[weakref.ref[pd.DataFrame], object, T]] = []
    """The one used last comes first."""

    @functools.wraps(function)
    def remembering(frame: pd.DataFrame, /, *more: P.args, **named: P.kwargs) -> T:
        for place, one in enumerate(kept):
            if one[0]() is frame and one[1] == (more, named):
                del kept[place]
                break
        else:
            one = (weakref.ref(frame), (more, named), function(frame, *more, **named))
        kept[:] = [one, *(other for other in kept if other[0]() is not None)][:_MOST]
        found = one[2]
        return cast(T, found.copy(deep=_DEEP)) if isinstance(found, pd.DataFrame) else found

    return remembering
