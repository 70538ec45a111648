"""Fits the parameters of a closed form to rows, regularized by their prior values.

In logarithms: residuals ``log measured - log predicted`` with the spread of rows, and for each parameter a residual
``log value - log default`` with its own spread. The method is Gauss-Newton with finite differences. Residuals count by
Huber's loss. For step times, with more rows than parameters, a second pass starts there with Tukey's biweight, whose
scale is the median absolute residual: rows beyond it (broken or stuck runs) then have no weight at all (Beaton and
Tukey 1974, doi:10.1080/00401706.1974.10489171). Step times of fewer rows are fitted by `workloads.predict.fit_few`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.predict.parameters import Parameter
from workloads.predict.points import Floats

STEP = 1e-3
"""Step of finite differences, in logarithms."""
ROUNDS = 12
HUBER = 2.0
"""Number of spreads beyond which residuals count by their size, not their square."""
TUKEY = 7.0
"""Number of scales beyond which a row has no weight. The usual 4.7 also drops host-bound rows, whose errors have long
tails."""
OF_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
WIDEST = 4.0
"""Maximum distance of a parameter from its default, in spreads."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Fitted values of the parameters and their covariance."""

    values: dict[str, float]
    names: tuple[str, ...]
    covariance: Floats
    """Covariance of the logarithms, shape (parameters, parameters)."""

    def spread_of(self, jacobian: Floats) -> Floats:
        """Standard deviation of the logarithm of predictions with these derivatives, shape (rows, parameters)."""
        variance = ((jacobian @ self.covariance) * jacobian).sum(axis=1)
        spread: Floats = np.sqrt(np.maximum(0.0, variance))
        return spread


def prior(parameters: Mapping[str, Parameter]) -> Fitted:
    """Values and covariance before any row is seen."""
    names = tuple(parameters)
    spreads = np.array([parameters[name].spread for name in names])
    return Fitted({name: parameters[name].value for name in names}, names, np.diag(spreads**2))


def derivatives(model: Callable[[Mapping[str, float]], Floats], values: Mapping[str, float]) -> tuple[Floats, Floats]:
    """Logarithm of the model's predictions, and its derivatives by the logarithms of the parameters."""
    start = np.log(model(values))
    columns = []
    for name in values:
        moved = {**values, name: values[name] * float(np.exp(STEP))}
        columns.append((np.log(model(moved)) - start) / STEP)
    return start, np.stack(columns, axis=1)


def fit(
    model: Callable[[Mapping[str, float]], Floats],
    measured: Floats,
    parameters: Mapping[str, Parameter],
    spread: float,
    weights: NDArray[np.float64] | None = None,
    near: Mapping[str, float] | None = None,
    *,
    stuck: bool = False,
) -> Fitted:
    """Fits ``parameters`` to the ``measured`` rows. ``model``: function from values to predictions of these rows.
    ``spread``: standard deviation of a row's logarithm. ``near``: starting values, such as those of nearly equal rows;
    None: the defaults. ``stuck``: whether rows far off are broken runs that get no weight, if there are more rows than
    parameters; from ``near`` such a fit leaves out the pass by Huber's loss."""
    names = tuple(parameters)
    default = np.log([parameters[name].value for name in names])
    wide = np.array([parameters[name].spread for name in names])
    theta = default.copy() if near is None else np.log([near[name] for name in names])
    target = np.log(measured)
    given = np.ones(len(measured)) if weights is None else weights

    def residuals(at: Floats) -> Floats:
        left: Floats = target - np.log(model(dict(zip(names, np.exp(at), strict=True))))
        return left

    def descend(theta: Floats, scale: float, loss: Loss) -> tuple[Floats, Floats]:
        def cost(at: Floats) -> float:
            return float((given * loss(residuals(at) / scale)[0]).sum() + 0.5 * (((at - default) / wide) ** 2).sum())

        damping, current = 1e-2, cost(theta)
        normal = np.diag(1 / wide**2)
        for _ in range(ROUNDS):
            start, jacobian = derivatives(model, dict(zip(names, np.exp(theta), strict=True)))
            weight = given * loss((target - start) / scale)[1] / scale**2
            normal = jacobian.T @ (weight[:, None] * jacobian) + np.diag(1 / wide**2)
            slope = jacobian.T @ (weight * (target - start)) - (theta - default) / wide**2
            for _ in range(6):
                step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
                new = np.clip(theta + step, default - WIDEST * wide, default + WIDEST * wide)
                if (after := cost(new)) <= current:
                    break
                damping *= 10
            else:
                break
            done = current - after < 1e-4 * max(1.0, current)
            theta, current, damping = new, after, damping / 5
            if done:
                break
        return theta, normal

    many = stuck and len(measured) > len(names)
    if near is None or not many:
        theta, normal = descend(theta, spread, _huber)
    if many:
        typical = OF_NORMAL * float(np.median(np.abs(residuals(theta)) * np.sqrt(given)))
        theta, normal = descend(theta, max(spread, typical), _tukey)
    return Fitted(dict(zip(names, np.exp(theta).tolist(), strict=True)), names, np.linalg.inv(normal))


Loss = Callable[[Floats], tuple[Floats, Floats]]
"""Function of residuals in scales; returns each row's loss and its weight, which is the loss's slope over the
residual."""


def _huber(z: Floats) -> tuple[Floats, Floats]:
    size = np.abs(z)
    loss = np.where(size <= HUBER, 0.5 * z**2, HUBER * (size - 0.5 * HUBER))
    return loss, np.minimum(1.0, HUBER / np.maximum(size, 1e-9))


def _tukey(z: Floats) -> tuple[Floats, Floats]:
    inside = np.maximum(0.0, 1 - (z / TUKEY) ** 2)
    return TUKEY**2 / 6 * (1 - inside**3), inside**2
