"""Compact storage of many different texts and numbers: names of runs share most of their parts, and count up.

A text is split at ``-``, ``_`` and ``.``. Texts with the same separators share a *form*. The parts at one position of a
form are stored together, where deflate compresses repetitions well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_CUT = re.compile(r"([-_.])")
_MOST_FORMS = 12
_TENS = 10 ** np.arange(1, 19)
_LEAST = 64
"""Smallest number of texts that is worth packing."""


def pack(texts: Sequence[str]) -> dict[str, Any] | None:
    """``texts`` packed by form, or None if packing saves nothing; `unpack` reverses it.

    ``forms``: each with its ``cuts`` (separators) and its ``places`` (positions). A position is a list of parts; if it
    has few distinct parts, ``levels`` and ``codes``; if its parts are whole numbers, ``steps``. ``form``: index of each
    text's form, present if there are several.
    """
    if len(texts) < _LEAST:
        return None
    cut = [_CUT.split(text) for text in texts]
    cuts = ["".join(parts[1::2]) for parts in cut]
    names = list(dict.fromkeys(cuts))
    if len(names) > _MOST_FORMS:
        return None
    forms = []
    for name in names:
        rows = [parts[::2] for parts, cuts_of_text in zip(cut, cuts, strict=True) if cuts_of_text == name]
        forms.append({"cuts": name, "places": [_place(list(place)) for place in zip(*rows, strict=True)]})
    packed: dict[str, Any] = {"forms": forms}
    if len(names) > 1:
        packed["form"] = [names.index(cuts_of_text) for cuts_of_text in cuts]
    return packed


def unpack(packed: dict[str, Any]) -> list[str]:
    """The texts, unpacked as in the page's ``columns.js``."""
    texts = []
    for form in packed["forms"]:
        places = [_parts(place) for place in form["places"]]
        texts.append(
            iter(["".join(chain(*zip(parts, [*form["cuts"], ""], strict=True))) for parts in zip(*places, strict=True)])
        )
    return [next(texts[form]) for form in packed["form"]] if "form" in packed else list(texts[0])


def steps(numbers: Sequence[int | float | None] | NDArray[np.int64]) -> list[int] | None:
    """Differences of consecutive whole numbers (the first from 0), if their text is shorter; otherwise None."""
    if not isinstance(numbers, np.ndarray) and not all(type(number) is int for number in numbers):
        return None
    whole = np.asarray(numbers, np.int64)
    differences = np.diff(whole, prepend=0)
    return cast("list[int]", differences.tolist()) if _letters(differences) < 0.8 * _letters(whole) else None


def _letters(whole: NDArray[np.int64]) -> int:
    """Number of characters of all numbers in decimal, signs included."""
    return len(whole) + int(np.searchsorted(_TENS, np.abs(whole), side="right").sum() + (whole < 0).sum())


def _parts(place: list[str] | dict[str, Any]) -> list[str]:
    if isinstance(place, list):
        return place
    if "steps" in place:
        return [str(number) for number in accumulate(place["steps"])]
    return [place["levels"][code] for code in place["codes"]]


def _place(parts: list[str]) -> list[str] | dict[str, Any]:
    levels = list(dict.fromkeys(parts))
    if len(levels) > len(parts) // 4:
        if all(part.isascii() and part.isdecimal() and part == str(int(part)) and len(part) < 16 for part in parts):
            added = steps([int(part) for part in parts])
            return parts if added is None else {"steps": added}
        return parts
    codes = {level: code for code, level in enumerate(levels)}
    return {"levels": levels, "codes": [codes[part] for part in parts]}
