"""Dataclasses made from plain data that nobody has checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from workloads.contract.typed import typed


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: int


@dataclass(frozen=True, kw_only=True)
class Record:
    point_id: str
    number: int = 0
    started_at: float = 0.0
    seconds: float | None = None
    method: Literal["measured", "rehearsed"] = "measured"
    nodes: tuple[str, ...] = ()
    inner: Inner | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    more: Any = None


def test_values_of_their_types_are_taken() -> None:
    fields = {"point_id": "a", "seconds": 3, "nodes": ["n"], "inner": {"number": 1}, "counts": {"ok": 2}, "more": [1]}
    assert typed(Record, fields) == Record(
        point_id="a", seconds=3, nodes=("n",), inner=Inner(number=1), counts={"ok": 2}, more=[1]
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([], r"\[\] holds no fields"),
        ({}, "missing 1 required keyword-only argument: 'point_id'"),
        ({"point_id": "a", "other": 1}, "unknown field 'other'"),
        ({"point_id": "../a"}, "point_id='../a' cannot be a part of a file's name"),
        ({"point_id": "\ud800"}, "point_id=.* is not of type str"),
        ({"point_id": "a", "number": True}, "number=True is not of type int"),
        ({"point_id": "a", "number": 10**400}, "is not of type int"),
        ({"point_id": "a", "seconds": float("nan")}, "seconds=nan"),
        ({"point_id": "a", "seconds": "3"}, "seconds='3'"),
        ({"point_id": "a", "started_at": float("inf")}, "started_at=inf"),
        ({"point_id": "a", "started_at": 1e12}, r"started_at=1000000000000\.0 is not a time"),
        ({"point_id": "a", "started_at": -1}, "started_at=-1 is not a time"),
        ({"point_id": "a", "method": "other"}, "method='other'"),
        ({"point_id": "a", "nodes": "node"}, "nodes='node'"),
        ({"point_id": "a", "nodes": [1]}, "a part of nodes=1 is not of type str"),
        ({"point_id": "a", "inner": {"number": "1"}}, "number='1' is not of type int"),
        ({"point_id": "a", "counts": {"ok": None}}, "counts.ok=None is not of type int"),
    ],
)
def test_other_values_are_named(fields: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        typed(Record, fields)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
