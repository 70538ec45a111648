"""Embedding of data and scripts in an HTML page: compressed, and unable to close the element that holds them."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from typing import Any

_LEVEL = 6
"""Compression level of zlib. Level 9 makes the rows of the study 2 % smaller and takes five times as long
(measured)."""


_MOST_PARTS = 512
"""Largest number of parts into which the entries of one dict or list are encoded."""
_CHUNK = 3 * 2**16
"""Bytes of compressed data that are put into base64 at once; a multiple of three, which needs no padding."""


def deflated(data: Any) -> str:
    """``data`` as deflated JSON in base64, the format of `Data.read` in ``templates/page/data.js``.

    A dict is encoded entry by entry, and a list of dicts in it item by item: the whole text would take tens of
    megabytes. Thousands of entries are small ones: they are encoded in batches.
    """
    packer = zlib.compressobj(_LEVEL)
    waiting = bytearray()
    texts: list[str] = []
    for part in _parts(data):
        waiting += packer.compress(part.encode("utf-8", "replace"))
        whole = len(waiting) - len(waiting) % _CHUNK
        texts.append(base64.b64encode(waiting[:whole]).decode("ascii"))
        del waiting[:whole]
    waiting += packer.flush()
    return "".join([*texts, base64.b64encode(waiting).decode("ascii")])


def _parts(data: Any) -> Iterator[str]:
    """The JSON text of ``data`` in parts."""
    if isinstance(data, dict) and len(data) > _MOST_PARTS:
        entries = list(data.items())
        for place, batch in _batches(entries):
            yield ("," if place else "{") + _json({str(name): value for name, value in batch})[1:-1]
        yield "}"
    elif isinstance(data, dict) and data:
        for place, (name, value) in enumerate(data.items()):
            yield f"{',' if place else '{'}{_json(str(name))}:"
            yield from _parts(value) if isinstance(value, dict) or _of_dicts(value) else (_json(value),)
        yield "}"
    elif _of_dicts(data):
        for place, batch in _batches(data):
            yield ("," if place else "[") + _json(batch)[1:-1]
        yield "]"
    else:
        yield _json(data)


def _batches(items: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    """At most `_MOST_PARTS` batches of ``items``, each with the place of its first item."""
    size = -(-len(items) // _MOST_PARTS)
    for place in range(0, len(items), size):
        yield place, items[place : place + size]


def _of_dicts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
