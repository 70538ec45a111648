"""Fits the parameters of a closed form to rows, regularized by their prior values.

In logarithms: residuals ``log measured - log predicted`` with the spread of rows, and for each parameter a residual
``log value - log default`` with its own spread. The method is Gauss-Newton with finite differences; outliers are
down-weighted (Huber), so that one broken run does not bend the fit.
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
) -> Fitted:
    """Fits ``parameters`` to the ``measured`` rows. ``model``: function from values to predictions of these rows.
    ``spread``: standard deviation of a row's logarithm. ``near``: starting values, such as those of nearly equal rows;
    None: the defaults."""
    names = tuple(parameters)
    default = np.log([parameters[name].value for name in names])
    wide = np.array([parameters[name].spread for name in names])
    theta = default.copy() if near is None else np.log([near[name] for name in names])
    target = np.log(measured)
    given = np.ones(len(measured)) if weights is None else weights

    def cost(at: Floats) -> float:
        z = (target - np.log(model(dict(zip(names, np.exp(at), strict=True))))) / spread
        size = np.abs(z)
        loss = np.where(size <= HUBER, 0.5 * z**2, HUBER * (size - 0.5 * HUBER))
        return float((given * loss).sum() + 0.5 * (((at - default) / wide) ** 2).sum())

    damping, current = 1e-2, cost(theta)
    normal = np.diag(1 / wide**2)
    for _ in range(ROUNDS):
        start, jacobian = derivatives(model, dict(zip(names, np.exp(theta), strict=True)))
        z = (target - start) / spread
        weight = given * np.minimum(1.0, HUBER / np.maximum(np.abs(z), 1e-9)) / spread**2
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
    return Fitted(dict(zip(names, np.exp(theta).tolist(), strict=True)), names, np.linalg.inv(normal))
