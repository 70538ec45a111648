"""Lengths of the documents that are packed into sequences: as a user writes them, as text, and drawn.

A sequence is filled with whole documents, one after the other; the last one is cut at the sequence's end, and the rest
of it is dropped. The next sequence begins with the next document. Every step has the same lengths (its tokens differ),
so that steps are repeats of one measurement and the planner knows the work of each. Sequence ``i`` does not depend on
how many sequences a step has.

    lognormal mean=1500 sigma=1.2 seed=7              drawn: exp(ln(mean) - sigma^2 / 2 + sigma z), at least 1
    file count=812 digest=0f3a... path=/data/len.txt  one length a line, in the order of the file, again from its start

The text is what an experiment stores. That of a file has the number of lengths and a digest of them, which are what an
experiment's hash is made of, too: the path alone says nothing about the lengths.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from statistics import NormalDist
from typing import Any

from workloads.spec.checks import MOST, Values, shown
from workloads.spec.errors import InvalidExperiment

MUST = (
    "null, {kind: lognormal, mean: 1500, sigma: 1.2, seed: 7} or the same as text, 'lognormal mean=1500 sigma=1.2 "
    "seed=7', or {kind: file, path: lengths.txt} or 'file path=lengths.txt' with one whole number of at least 1 a line"
)
_LOGNORMAL = re.compile(r"lognormal mean=([0-9.e+]+) sigma=([0-9.e+-]+) seed=(-?[0-9]+)")
_TYPED = re.compile(r"lognormal mean=([0-9.e+]+) sigma=([0-9.e+-]+)(?: seed=(-?[0-9]+))?")
"""The same as a user may type it."""
_TYPED_FILE = "file path="
_FILE = re.compile(r"file count=([0-9]+) digest=([0-9a-f]{16}) path=(.+)")
_LONGEST = 2**40
"""Tokens of a document: longer ones are a mistake of units, and no sequence is longer."""
_MOST_LENGTHS = 10_000_000
"""Lengths of a file."""


def canonical_documents(value: Any) -> str | None:
    """The text of what a user wrote. A file is read, and its path becomes absolute.

    Raises `InvalidExperiment` for other values, for a file that cannot be read, and for one that no longer has the
    lengths of its text.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return _of_mapping({str(name): one for name, one in value.items()})
    if isinstance(value, str) and (found := _FILE.fullmatch(value)):
        text = _of_file(found[3])
        if text.split(" path=")[0] != value.split(" path=")[0]:
            raise InvalidExperiment(f"documents: {shown(found[3])} no longer has the lengths of {shown(value)}")
        return text
    if isinstance(value, str) and (found := _TYPED.fullmatch(value)):
        return _of_lognormal({"mean": _number(found[1]), "sigma": _number(found[2]), "seed": int(found[3] or 0)})
    if isinstance(value, str) and value.startswith(_TYPED_FILE):
        return _of_file(value.removeprefix(_TYPED_FILE))
    raise InvalidExperiment(f"documents={shown(value)} must be {MUST}")


def is_written(value: object) -> bool:
    """Whether a value is null or a text of documents, as stored. Files are not read."""
    if value is None:
        return True
    return isinstance(value, str) and bool(_LOGNORMAL.fullmatch(value) or _FILE.fullmatch(value))


def without_path(text: str | None) -> str | None:
    """The part of the text that can change a number."""
    return text if text is None else text.split(" path=")[0]


class DocumentValues(Values):
    """The rule for a grid's axis: what a user may write, which becomes text."""

    def check(self, place: str, value: Any, *, error: type[Any] = InvalidExperiment) -> Any:
        try:
            return canonical_documents(value)
        except InvalidExperiment as mistake:
            raise error(f"{place}: {mistake}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _of_mapping(fields: Mapping[str, Any]) -> str:
    kinds = {"lognormal": (_of_lognormal, {"mean", "sigma", "seed"}), "file": (None, {"path"})}
    kind = fields.get("kind")
    if kind not in kinds:
        raise InvalidExperiment(f"documents={shown(dict(fields))} must be {MUST}")
    known = kinds[kind][1]
    given = set(fields) - {"kind"}
    if given - known or known - given - {"seed"}:
        raise InvalidExperiment(
            f"documents={shown(dict(fields))}: kind={kind} has the fields {', '.join(sorted(known))}"
        )
    return _of_file(fields["path"]) if kind == "file" else _of_lognormal(fields)


def _of_lognormal(fields: Mapping[str, Any]) -> str:
    mean, sigma, seed = fields["mean"], fields["sigma"], fields.get("seed", 0)
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (mean, sigma))
    if not numbers or not 1 <= mean <= _LONGEST or not 0 <= sigma <= 10:
        raise InvalidExperiment(
            f"documents: mean={shown(mean)} must be a number of tokens of at least 1, and sigma={shown(sigma)} a "
            "number from 0 to 10"
        )
    if type(seed) is not int or abs(seed) > MOST:
        raise InvalidExperiment(f"documents: seed={shown(seed)} must be a whole number")
    return f"lognormal mean={float(mean):g} sigma={float(sigma):g} seed={seed}"


def _of_file(path: Any) -> str:
    if not isinstance(path, str) or not path or "\n" in path:
        raise InvalidExperiment(f"documents: path={shown(path)} must be the path of a file of lengths")
    whole = str(Path(path).expanduser().resolve())
    lengths = _read(whole)
    return f"file count={len(lengths)} digest={_digest(lengths)} path={whole}"


def _digest(lengths: tuple[int, ...]) -> str:
    return hashlib.sha256(" ".join(map(str, lengths)).encode()).hexdigest()[:16]


@lru_cache(maxsize=8)
def _read(path: str) -> tuple[int, ...]:
    """The lengths of a file. Read once a process."""
    try:
        lines = Path(path).read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text of numbers"
        raise InvalidExperiment(f"documents: cannot read {shown(path)}: {reason}") from None
    lengths = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text and number == len(lines):
            continue
        if not text.isdigit() or not 1 <= int(text) <= _LONGEST:
            raise InvalidExperiment(
                f"documents: line {number} of {shown(path)} is {shown(text)}; it must be a whole number of at least 1"
            )
        lengths.append(int(text))
    if not 1 <= len(lengths) <= _MOST_LENGTHS:
        raise InvalidExperiment(
            f"documents: {shown(path)} has {len(lengths):,} lengths; it may have 1 to {_MOST_LENGTHS:,}"
        )
    return tuple(lengths)


@lru_cache(maxsize=32)
def packed(documents: str, seq_len: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Lengths of the documents in each of the first ``count`` sequences, in order; those of a sequence add up to
    ``seq_len``. Equal on every rank and machine."""
    lengths = _lengths(documents)
    sequences = []
    for _ in range(count):
        held, left = [], seq_len
        while left:
            held.append(min(left, next(lengths)))
            left -= held[-1]
        sequences.append(tuple(held))
    return tuple(sequences)


def _lengths(documents: str) -> Iterator[int]:
    """All lengths, without end."""
    if found := _FILE.fullmatch(documents):
        lengths = _read(found[3])
        if (len(lengths), _digest(lengths)) != (int(found[1]), found[2]):
            raise InvalidExperiment(f"documents: {shown(found[3])} no longer has the lengths of {shown(documents)}")
        return cycle(lengths)
    return _drawn(documents)


def _drawn(documents: str) -> Iterator[int]:
    """Lengths of a log-normal distribution. Only `random.random` is used, whose numbers Python does not change."""
    found = _LOGNORMAL.fullmatch(documents)
    assert found is not None
    mean, sigma = float(found[1]), float(found[2])
    centre, normal, draw = math.log(mean) - sigma**2 / 2, NormalDist(), random.Random(int(found[3]))
    while True:
        share = draw.random()
        z = normal.inv_cdf(share) if share > 0 else -math.inf
        yield max(1, round(min(_LONGEST, math.exp(min(centre + sigma * z, 40)))) if sigma else round(mean))
