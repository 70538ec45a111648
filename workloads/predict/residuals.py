"""Residuals of a fitted closed form, learned by a Gaussian process from the rows of the fit.

Its kernel sums over what rows may have in common: a device and precision, a version of the code, a model, and closeness
in the features below (logarithms, so that a distance is a factor). Close rows of one device and precision whose times
contain a structure factor also have a part of that factor's error in common, so that few rows with routed experts tell
how far others are off, whatever dense rows need. Far from all rows the mean is zero and the spread that of the prior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.predict.points import Floats, Points


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualKernel:
    """Standard deviations of the parts, in logarithms of time."""

    common: float = 0.05
    device: float = 0.05
    version: float = 0.03
    near: float = 0.1
    noise: float = 0.05
    reach: float = 2.5
    """Factor on the lengths of `LENGTHS`."""
    structure: float = 1.0
    """Factor on `Points.structure_doubt`, which is of times; 0 for other quantities."""


LENGTHS: dict[str, float] = {
    "tokens": 1.5,
    "hidden": 0.7,
    "layers": 0.7,
    "seq": 1.0,
    "micro_batches": 1.5,
    "dp": 2.0,
    "tp": 0.8,
    "pp": 1.0,
    "cp": 0.8,
    "vpp": 1.0,
    "zero": 1.0,
    "recompute": 1.0,
    "world": 0.5,
    "ep": 0.8,
    "intra": 0.05,
}


def features(x: Points) -> Floats:
    """Features, shape (rows, features), each divided by the length over which rows are correlated."""
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = {
            "tokens": np.log(x.tokens),
            "hidden": np.log(x.hidden),
            "layers": np.log(x.layers),
            "seq": np.log(x.seq),
            "micro_batches": np.log(x.micro_batches),
            "dp": np.log(x.dp),
            "tp": np.log(x.tp),
            "pp": np.log(x.pp),
            "cp": np.log(x.cp),
            "vpp": np.log(x.vpp),
            "ep": np.log(x.ep),
            "zero": (x.zero >= 1).astype(float) + (x.zero == 3),
            "recompute": x.recompute,
            "world": np.where(x.gpus > x.node, np.log(x.world_measured / 1e11), 0.0),
            "intra": np.log(x.intra_measured / 4.5e11),
        }
    return np.stack([np.nan_to_num(columns[name]) / length for name, length in LENGTHS.items()], axis=1)


def covariance(a: Points, b: Points, k: ResidualKernel) -> Floats:
    """Covariance of shape (rows of a, rows of b), without noise."""
    x, y = features(a) / k.reach, features(b) / k.reach
    square = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1)[None, :] - 2 * x @ y.T
    same_device = (a.device[:, None] == b.device[None, :]) & (a.fp8[:, None] == b.fp8[None, :])
    same_version = a.version[:, None] == b.version[None, :]
    near = np.exp(-0.5 * np.maximum(square, 0.0))
    of_structures = k.structure**2 * a.structure_doubt[:, None] * b.structure_doubt[None, :]
    total: Floats = (
        k.common**2
        + k.device**2 * same_device
        + k.version**2 * (same_version & same_device)
        + k.near**2 * near
        + of_structures * same_device * near
    )
    return total


def prior_variance(points: Points, k: ResidualKernel) -> Floats:
    """The diagonal of `covariance`: variance at each point before any row is seen."""
    of_all = k.common**2 + k.device**2 + k.version**2 + k.near**2
    variance: Floats = of_all + (k.structure * points.structure_doubt) ** 2
    return variance


@dataclass(frozen=True, slots=True)
class Residuals:
    """Gaussian process of residuals in logarithms, learned from rows."""

    rows: Points
    kernel: ResidualKernel
    weights: Floats
    inverse: Floats

    @classmethod
    def learn(cls, rows: Points, residual: Floats, kernel: ResidualKernel, noise: Floats | float = 1.0) -> Residuals:
        """Learns from residuals in logarithms. ``noise``: factor on the kernel's noise, for all rows or by row."""
        return cls.of_noise(rows, residual, kernel, robust_noise(residual, kernel.noise) * noise)

    @classmethod
    def of_noise(cls, rows: Points, residual: Floats, kernel: ResidualKernel, robust: Floats) -> Residuals:
        """Learns from residuals in logarithms with the standard deviation ``robust`` of each row's noise."""
        matrix = covariance(rows, rows, kernel) + np.diag(robust**2)
        inverse = np.linalg.inv(matrix)
        return cls(rows, kernel, inverse @ residual, inverse)

    def at(self, points: Points, noise: Floats | float = 1.0, chunk: int = 2000) -> tuple[Floats, Floats]:
        """Mean and standard deviation (noise included) of residuals at ``points``."""
        noise_by_row = np.broadcast_to(self.kernel.noise * noise, (len(points),))
        mean, spread = np.empty(len(points)), np.empty(len(points))
        for start in range(0, len(points), chunk):
            part = slice(start, min(start + chunk, len(points)))
            those = points.take(np.arange(part.start, part.stop))
            among = covariance(those, self.rows, self.kernel)
            mean[part] = among @ self.weights
            known = ((among @ self.inverse) * among).sum(axis=1)
            left = np.maximum(0.0, prior_variance(those, self.kernel) - known)
            spread[part] = np.sqrt(left + noise_by_row[part] ** 2)
        return mean, spread

    def explained(self, points: Points, of_rows: Floats) -> Floats:
        """What the process says at ``points`` of functions with the values ``of_rows`` at its rows, of shape (rows,
        functions)."""
        said: Floats = covariance(points, self.rows, self.kernel) @ (self.inverse @ of_rows)
        return said


def robust_noise(residual: Floats, noise: float) -> Floats:
    """Noise by row: a row whose residual is far from the others' is assumed to be noisier."""
    if len(residual) < 5:
        return np.full(len(residual), noise)
    middle = float(np.median(residual))
    typical = 1.4826 * float(np.median(np.abs(residual - middle))) + noise
    excess = np.maximum(0.0, np.abs(residual - middle) / typical - 3.0)
    return noise * (1 + excess)
