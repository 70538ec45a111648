"""What differs between Python and JavaScript, in functions that a test runs in both."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache, reduce
from itertools import accumulate, chain, pairwise
from operator import itemgetter, mul
from typing import Any, NamedTuple

_WIDE, NARROW = 3, {"a": (1, 2), "b": (3, 4)}


_NUMBER = re.compile(r"(\d+)(k)?")


class Level(IntEnum):
    LOW = 1
    HIGH = 5


class Pair(NamedTuple):
    left: int
    right: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    size: int
    pairs: tuple[Pair, ...] = ()
    label: str = "new"

    @property
    def total(self) -> int:
        return self.size + sum(pair.left * pair.right for pair in self.pairs)

    def __add__(self, other: Box) -> Box:
        return replace(self, size=self.size + other.size, pairs=self.pairs + other.pairs)

    @classmethod
    def of(cls, *sizes: int) -> Box:
        return cls(label="of", size=sum(sizes))


def summed(sizes: list[int]) -> int:
    return sum((Box(size=size) for size in sizes), Box(size=1)).size


class Shelf:
    def __init__(self, first: int) -> None:
        self.held: list[int] = [first]
        self.seen: Counter[tuple[bool, int]] = Counter()

    def put(self, value: int) -> int:
        self.held.append(value)
        self.seen[value > 0, abs(value)] += 1
        return self.seen[value > 0, abs(value)]


@dataclass(frozen=True)
class Square:
    side: int

    def area(self, *, times: int = 1) -> int:
        return self.side**2 * times


@dataclass(frozen=True)
class Strip:
    side: int
    length: int = 4

    def area(self, *, times: int = 1) -> int:
        return self.side * self.length * times


Shape = Square | Strip
KINDS: dict[str, type[Any]] = {"square": Square, "strip": Strip}
_CORNERS = {Square: 4, Strip: 2}


@dataclass(frozen=True)
class Page:
    shapes: tuple[Shape, ...]
    back: Shape | None = None

    def areas(self) -> list[Any]:
        corners = [_CORNERS[type(shape)] for shape in self.shapes]
        squares = [isinstance(shape, Square | Pair) for shape in self.shapes]
        return [[shape.area(times=2) for shape in self.shapes], corners, squares, self.back]


def division(a: int, b: int) -> list[Any]:
    return [a // b, a % b, -a // b, -a % b, -(-a // b), divmod(-a, b), a % b == 0, a / b, 2**b]


def rounding() -> list[Any]:
    return [round(0.5), round(1.5), round(2.5), round(-0.5), round(2.4), int(-2.7), math.ceil(2.1), math.floor(-2.1)]


def truths(items: list[int], text: str, table: dict[str, int]) -> list[Any]:
    empty: tuple[int, ...] = ()
    return [
        bool(items),
        not text,
        "yes" if table else "no",
        empty or (1,),
        items and items[0],
        [name for name in (text, "x") if name],
        0 or None,
        items == [1, 2] or items != [3],
        1 < len(items) <= 3,
    ]


def lists(items: list[int]) -> list[Any]:
    first, *rest = [*items, 5]
    *most, last = rest
    items = items + items[:1]
    items += [8]
    doubled = [0] * 2 + [one for one in items for _ in range(2) if one % 2]
    doubled[0], doubled[1] = doubled[1] + 1, doubled[0]
    at = -1
    return [
        first,
        most,
        last,
        items[-2],
        items[at],
        items[1:],
        items[:-1],
        items[::-1],
        doubled,
        9 in items,
        (1, 2) in [(1, 2)],
    ]


def records() -> list[Any]:
    box = Box(size=2, pairs=(Pair(1), Pair(right=2, left=3)))
    both = box + Box.of(1, 2)
    (left, right), *_ = both.pairs
    same = {Pair(1): "one", Pair(3, 2): "three"}
    return [
        box.total,
        both.total,
        both.label,
        left,
        right,
        Pair(1) == Pair(1, 7),
        same[box.pairs[1]],
        Pair(2)._replace(right=1).right,
    ]


def tables() -> list[Any]:
    of: dict[tuple[int, str], list[int]] = {}
    for place, name in enumerate(("a", "b", "a"), 1):
        of.setdefault((len(name), name), []).append(place)
    more = {**{name: sum(pair) for name, pair in NARROW.items()}, "c": _WIDE}
    return [
        list(of.values()),
        [key for key, _ in of],
        more.get("z", -1),
        more["c"],
        "c" in more,
        sorted(more),
        max(more.values()),
    ]


def library(items: list[int]) -> list[Any]:
    counted = Counter(one % 3 for one in items)
    seconds = sorted(counted.items(), key=itemgetter(1, 0))
    return [
        [counted[7], counted.get(1), dict(counted) == {one: counted[one] for one in counted}],
        seconds,
        [bisect_left(items, 3), bisect_right(items, 3), reduce(min, items, 9), list(chain(items, (1,)))],
        list(map(mul, items, items[1:])),
        [items.count(3), items.index(3)],
        list(zip(*((one, -one) for one in items), strict=True)),
    ]


def order(items: list[int]) -> list[Any]:
    pairs = [(one % 2, one) for one in items]
    return [
        sorted(pairs, reverse=True),
        max(pairs),
        min(items, key=lambda one: (one % 3, -one)),
        max((one for one in items if one > 99), default=-1),
        sorted(items, key=lambda one: one % 2),
        [a < b for a, b in pairwise(pairs)],
        list(accumulate(items)),
        next((one for one in items if one > 1), None),
        any(one > 3 for one in items),
        all(one for one in items),
    ]


def loops(limit: int) -> list[Any]:
    found = total = 0
    for step in range(limit, 0, -2):
        if step == 4:
            continue
        kind = "even" if step % 2 == 0 else "odd"
        total += step
        found += kind == "odd"
    while (left := limit - total) < 0:
        total -= 3
    return [found, total, left, [int(level) for level in Level], Level.HIGH > Level.LOW, f"{found} of {limit}"]


def texts(text: str) -> list[Any]:
    at = 0
    found: list[Any] = []
    while at < len(text):
        if (number := _NUMBER.match(text, at)) is not None:
            found.append((int(number[1]), number[0], number[2]))
            at = number.end()
        elif text[at] == "!":
            raise ValueError(f"{text!r} ends at {at:,}")
        else:
            found.append((text[at : at + 1] * 2, text[at] in "ab", text.count(text[at]), text.startswith("a")))
            at += 1
    return found


def down(number: int) -> Iterator[int]:
    while number > 0:
        yield number
        number -= 1
    yield from (0, -1)


@lru_cache(maxsize=8)
def below(number: int, *, half: bool = False) -> tuple[int, ...]:
    return tuple(one // 2 if half else one for one in down(number))


def calls(number: int) -> list[Any]:
    def scaled(value: int, by: int = _WIDE) -> int:
        return value * by

    shelf = Shelf(number)
    counts = [shelf.put(value) for value in (2, -2, 2)]
    return [below(number, half=True), below(number), scaled(2), scaled(2, by=number), shelf.held, counts]
