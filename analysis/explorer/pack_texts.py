"""Many different texts and numbers in few bytes: names of runs agree in most of their parts, and count up.

A text is cut at ``-``, ``_`` and ``.``. Texts that are cut alike are of one *form*; the parts that stand in one place
of a form are kept together, where a deflated page repeats them at next to no cost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, cast

_CUT = re.compile(r"([-_.])")
_MOST_FORMS = 12
_LEAST = 64
"""Fewer texts are not worth it."""


def pack(texts: Sequence[str]) -> dict[str, Any] | None:
    """``texts`` by form, or None where that is no shorter than a list of them; `unpack` has them back.

    ``forms``: each with its ``cuts`` and its ``places``, lists of parts; a place where most texts agree has ``levels``
    and ``codes`` instead of a list, one of whole numbers ``steps``. ``form``: which form each text has, where there
    are several.
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
        rows = [parts[::2] for parts, own in zip(cut, cuts, strict=True) if own == name]
        forms.append({"cuts": name, "places": [_place(list(place)) for place in zip(*rows, strict=True)]})
    packed: dict[str, Any] = {"forms": forms}
    if len(names) > 1:
        packed["form"] = [names.index(own) for own in cuts]
    return packed


def unpack(packed: dict[str, Any]) -> list[str]:
    """The texts, as the page's ``columns.js`` unpacks them."""
    texts = []
    for form in packed["forms"]:
        places = [_parts(place) for place in form["places"]]
        texts.append(
            iter(["".join(chain(*zip(parts, [*form["cuts"], ""], strict=True))) for parts in zip(*places, strict=True)])
        )
    return [next(texts[form]) for form in packed["form"]] if "form" in packed else list(texts[0])


def steps(numbers: Sequence[int | float | None]) -> list[int] | None:
    """Whole numbers as what each adds to the one before it (the first to 0), where that is written shorter."""
    if not all(type(number) is int for number in numbers):
        return None
    whole = cast("Sequence[int]", numbers)
    found = [number - before for before, number in zip((0, *whole), whole, strict=False)]
    return found if sum(map(len, map(str, found))) < 0.8 * sum(map(len, map(str, whole))) else None


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
