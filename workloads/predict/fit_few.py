"""Fits the parameters of a closed form to few rows, fewer than parameters, whose errors are partly common.

Of log(measured / predicted) = error of the parameters + g + noise, g is what a closed form leaves out, the Gaussian
process of `workloads.predict.residuals`: rows of one cluster, and rows alike, have much of it in common. With a spread
of each row by itself a fit would explain what is common by whichever parameters fit the few rows best, and carry that
to rows unlike these. So the fit is generalized least squares with the process's covariance, by Gauss-Newton.

Noise has Student's distribution, with the weights of the expectation-maximization of Lange, Little and Taylor 1989
(doi:10.1080/01621459.1989.10478852) around what parameters and process explain together; and a part of the runs is
broken: a stuck run among ten would otherwise bend all parameters, or one that only it can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from workloads.predict.fit import WIDEST, Fitted, derivatives
from workloads.predict.parameters import Parameter
from workloads.predict.points import Floats

DEGREES = 4.0
"""Degrees of freedom of Student's distribution of noise, the usual choice for robust regression."""
ROUNDS = 12
BROKEN, BROKEN_RANGE, BROKEN_WEIGHT = 0.03, 6.0, 1e-3
"""Share of runs that are broken, range of their residuals, e^-3 to e^3, and least weight. Of the study's runs, as
predicted from those of its other models, 2.8 % are off by more than a factor of e."""
_UPDATES = 15
"""Most updates of the weights in a round."""


@dataclass(frozen=True, slots=True)
class FittedFew:
    fitted: Fitted
    residual: Floats
    """log(measured / predicted) of each row by the fitted form."""
    noise: Floats
    """Standard deviation of each row's noise with its weight: large for a row that nothing explains."""
    broken: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Rows that are likelier broken than explained."""
    jacobian: Floats
    """Derivatives at the rows by the logarithms of the parameters, shape (rows, parameters)."""


def fit_few(
    model: Callable[[Mapping[str, float]], Floats],
    measured: Floats,
    parameters: Mapping[str, Parameter],
    common: Floats,
    noise: Floats,
    near: Mapping[str, float] | None = None,
) -> FittedFew:
    """Fits ``parameters`` to the ``measured`` rows. ``model``: function from values to predictions of these rows.
    ``common``: covariance of g at the rows; ``noise``: standard deviation of each row's noise, both in logarithms.
    ``near``: starting values, as those of nearly equal rows; None: the defaults."""
    names = tuple(parameters)
    default = np.log([parameters[name].value for name in names])
    wide = np.array([parameters[name].spread for name in names])
    theta = default.copy() if near is None else np.log([near[name] for name in names])
    target = np.log(measured)
    weight = sound = np.ones(len(measured))

    def residuals(at: Floats) -> Floats:
        left: Floats = target - np.log(model(dict(zip(names, np.exp(at), strict=True))))
        return left

    for _ in range(ROUNDS):
        start, jacobian = derivatives(model, dict(zip(names, np.exp(theta), strict=True)))
        left = target - start
        weight, sound = _weights(left + jacobian @ (theta - default), common + (jacobian * wide**2) @ jacobian.T, noise)
        inverse = np.linalg.inv(common + np.diag(noise**2 / (weight * sound)))

        def cost(at: Floats, left: Floats, inverse: Floats = inverse) -> float:
            return float(left @ inverse @ left + (((at - default) / wide) ** 2).sum())

        now = cost(theta, left)
        normal = jacobian.T @ inverse @ jacobian + np.diag(1 / wide**2)
        slope = jacobian.T @ inverse @ left - (theta - default) / wide**2
        step, share = np.linalg.solve(normal, slope), 1.0
        while share > 1e-3:
            new = np.clip(theta + share * step, default - WIDEST * wide, default + WIDEST * wide)
            if (after := cost(new, residuals(new))) <= now:
                break
            share /= 4
        else:
            break
        theta = new
        if now - after < 1e-4 * max(1.0, now):
            break
    start, jacobian = derivatives(model, dict(zip(names, np.exp(theta), strict=True)))
    spread = noise / np.sqrt(weight * sound)
    inverse = np.linalg.inv(common + np.diag(spread**2))
    normal = jacobian.T @ inverse @ jacobian + np.diag(1 / wide**2)
    values = dict(zip(names, np.exp(theta).tolist(), strict=True))
    return FittedFew(Fitted(values, names, np.linalg.inv(normal)), target - start, spread, sound < 0.5, jacobian)


def _weights(left: Floats, explained: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Weights of rows with the residuals ``left`` from the defaults, and how sure it is that they are not broken, both
    factors on the inverse variance of their noise. ``explained``: covariance of what parameters and process may explain
    of the residuals.

    A row may be far off only because a parameter alone can follow it, far from its default. So each row's residual is
    also compared with what the other rows and the priors expect of it.
    """
    weight, sound = np.ones(len(left)), np.ones(len(left))
    for _ in range(_UPDATES):
        variance = noise**2 / (weight * sound)
        inverse = np.linalg.inv(explained + np.diag(variance))
        own, pulled = np.diag(inverse), inverse @ left
        expected = (variance * pulled) ** 2 + variance - variance**2 * own
        of_others = np.maximum(0.0, 1 / own - variance) + noise**2 / weight
        usual = np.exp(-0.5 * (pulled / own) ** 2 / of_others) / np.sqrt(2 * np.pi * of_others)
        sure = (1 - BROKEN) * usual / ((1 - BROKEN) * usual + BROKEN / BROKEN_RANGE)
        before = weight * sound
        weight = (DEGREES + 1) / (DEGREES + np.where(sure > 0.5, expected / noise**2, 1.0))
        sound = np.maximum(sure, BROKEN_WEIGHT)
        if float(np.abs(np.log(weight * sound / before)).max()) < 0.03:
            break
    return weight, sound
