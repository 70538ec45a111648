"""What a sweep took and what training would take: device-hours, and money and energy where a price or a power is known.

Nothing is assumed: without ``price_per_gpu_hour`` in the frame's ``attrs`` no money is told, without measured power no
energy. Power is that of the devices alone, without hosts, network and cooling.
"""

from __future__ import annotations

import pandas as pd

from analysis.rows import labels, metrics

TRILLION = 1e12
SPENT = ("model", *metrics.GROUP, "outcome", "attempts", "device_hours", "price", "attempts_without_duration")
TRAINING = (
    *(*metrics.GROUP, "layout", metrics.RANK_BY, "tie", "device_hours_per_trillion_tokens"),
    *("days_per_trillion_tokens", "price_per_trillion_tokens", "power_w", "wh_per_million_tokens", "attempt_id"),
)


def price_per_device_hour(frame: pd.DataFrame) -> float | None:
    """The price that whoever reads the report named; None when nobody did."""
    price = frame.attrs.get("price_per_gpu_hour")
    return None if price is None else float(price)


def held_hours(frame: pd.DataFrame) -> pd.Series:
    """Hours times devices that each attempt held, NaN where its duration is unknown. A rehearsal holds one device."""
    devices = frame["world_size"].where(frame["method"] == "measured", 1)
    return frame["duration_s"] * devices / 3600


def spent(frame: pd.DataFrame) -> pd.DataFrame:
    """Device-hours of all attempts, retries included, by model, number of devices and outcome: `SPENT`.

    Attempts without a duration are counted beside the sum, which is over the others. Empty when none has one.
    """
    if frame["duration_s"].isna().all():
        return pd.DataFrame(columns=[*SPENT])
    price = price_per_device_hour(frame)
    rows = frame.assign(device_hours=held_hours(frame))
    groups = rows.groupby(["model", *metrics.GROUP, "outcome"], sort=False)
    found = groups.agg(
        attempts=("attempt_id", "size"), known=("device_hours", "count"), device_hours=("device_hours", "sum")
    )
    found = found.reset_index()
    found = found.assign(
        device_hours=found["device_hours"].where(found["known"] > 0),
        price=float("nan") if price is None else found["device_hours"] * price,
        attempts_without_duration=found["attempts"] - found["known"],
    )
    order = {name: place for place, name in enumerate(labels.workload_order(frame))}
    found = found.sort_values(["workload", "world_size"], key=lambda column: column.map(order).fillna(column))
    return found[[*SPENT]].reset_index(drop=True)


def training(frame: pd.DataFrame) -> pd.DataFrame:
    """What a trillion tokens take with the fastest layout of each model and number of devices: `TRAINING`.

    hours = 1e12 / (tokens/s/GPU) / 3600 over all devices; days = 1e12 / (tokens/s/GPU × devices) / 86400;
    Wh per million tokens = W / (tokens/s/GPU) × 1e6 / 3600. At the speed of the timed steps: no restart, no
    evaluation, no failure is in it. ``tie``: the next layout's timed steps overlap the winner's.
    """
    best = metrics.best_configurations(frame)
    if best.empty:
        return pd.DataFrame(columns=[*TRAINING])
    best = labels.in_group_order(best)
    price, rate = price_per_device_hour(frame), best[metrics.RANK_BY]
    hours = TRILLION / rate / 3600
    found = best.assign(
        device_hours_per_trillion_tokens=hours,
        days_per_trillion_tokens=hours / best["world_size"] / 24,
        price_per_trillion_tokens=float("nan") if price is None else hours * price,
        wh_per_million_tokens=best["power_w"].astype(float) / rate * 1e6 / 3600,
    )
    return found[[*TRAINING]].reset_index(drop=True)
