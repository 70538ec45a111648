"""Degrees and batch of a row of `workloads.predict.table`: what is missing follows from the others."""

from __future__ import annotations

import math
from collections.abc import Mapping

from workloads.predict.cells.numbers import not_missing
from workloads.predict.cells.words import Refused
from workloads.predict.hardware import refuse_too_many
from workloads.spec.cluster import ClusterSpec


def layout_of(n: Mapping[str, float | None], cluster: ClusterSpec, note: list[str]) -> dict[str, float]:
    """The degrees of a row, and its number of devices; what is missing follows from the others. Raises `Refused` if it
    does not, or if they disagree."""
    degrees = {name: n[name] for name in ("dp", "tp", "pp", "cp")}
    known = math.prod(value for value in degrees.values() if value is not None)
    gpus = n["gpus"]
    if gpus is None:
        if degrees["dp"] is None or degrees["tp"] is None or degrees["pp"] is None:
            raise Refused("gpus is not given; give it, or all of dp, tp and pp")
        gpus = known
    missing = [name for name, value in degrees.items() if value is None]
    if missing:
        if gpus % known:
            raise Refused(f"{_product(degrees)} does not divide gpus = {gpus:g}")
        rest = gpus / known
        open_name = "dp" if "dp" in missing else missing[0] if len(missing) == 1 else None
        if rest != 1 and open_name is None:
            raise Refused(
                f"{' and '.join(missing)} not given, and {_product(degrees)} does not multiply to gpus = {gpus:g}"
            )
        for name in missing:
            degrees[name] = rest if name == open_name else 1.0
        if open_name is not None and open_name != "dp" and rest != 1:
            note.append(f"{open_name} not given: {rest:g}, with which the degrees multiply to gpus = {gpus:g}")
    dp, tp, pp, cp = (not_missing(degrees[name]) for name in ("dp", "tp", "pp", "cp"))
    if dp * tp * pp * cp != gpus:
        if cp > 1 and dp % cp == 0 and dp * tp * pp == gpus:
            dp /= cp
            note.append("dp included the context-parallel ranks: divided by cp")
        else:
            raise Refused(
                f"dp x tp x pp x cp = {dp:g} x {tp:g} x {pp:g} x {cp:g} = {dp * tp * pp * cp:g}, gpus = {gpus:g}"
            )
    refuse_too_many(gpus, cluster)
    vpp, ep = n["vpp"] or 1.0, n["ep"] or 1.0
    if vpp > 1 and pp == 1:
        note.append(f"vpp {vpp:g} without a pipeline: taken as 1")
        vpp = 1.0
    return {"gpus": gpus, "dp": dp, "tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "ep": ep}


def fill_batch(n: dict[str, float | None], layout: Mapping[str, float], note: list[str]) -> None:
    """Fills in values that follow from the others. Raises `Refused` if they disagree or too few are known."""
    dp, mbs, m, gbs = layout["dp"], n["mbs"], n["grad_accum"], n["gbs_seqs"]
    if gbs is not None and m is None and mbs is not None:
        m = gbs / dp / mbs
    elif gbs is not None and mbs is None and m is not None:
        mbs = gbs / dp / m
    elif gbs is not None and mbs is None and m is None:
        m, mbs = 1.0, gbs / dp
        note.append("mbs and grad_accum not given: one micro-batch")
        if layout["pp"] > 1:
            m, mbs = gbs / dp, 1.0
            note[-1] = "mbs and grad_accum not given: micro-batches of one sequence"
    elif gbs is None and mbs is not None and m is None:
        m = 1.0 if layout["pp"] == 1 else None
        note.append("grad_accum not given: 1")
    if mbs is None or m is None:
        raise Refused("the batch is not known: give two of gbs_seqs, mbs and grad_accum")
    if gbs is not None and abs(dp * mbs * m - gbs) > 1e-6 * gbs:
        raise Refused(f"dp x mbs x grad_accum = {dp:g} x {mbs:g} x {m:g} = {dp * mbs * m:g}, gbs_seqs = {gbs:g}")
    if mbs <= 0 or m <= 0 or m != round(m):
        raise Refused(f"gbs_seqs = {gbs or 0:g} is not a multiple of dp x mbs = {dp * mbs:g}")
    n["mbs"], n["grad_accum"] = mbs, m


def _product(degrees: Mapping[str, float | None]) -> str:
    given = [f"{name} {value:g}" for name, value in degrees.items() if value is not None]
    return " x ".join(given) or "no degree"
