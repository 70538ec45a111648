"""States which steps the engine can capture as one CUDA graph: the cases of the planner's rule ``cuda_graph``.

With ``cuda_graph=step`` a layout that cannot be captured is refused at planning; with ``auto`` it runs eagerly, and its
row has the reason. What is refused is what the host would have to wait for: a graph is launched without its knowing any
number of the device.
"""

from __future__ import annotations

from functools import lru_cache

from workloads.rules.rule_values import LAYOUT_NAMES, layout_values
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.expressions import Expression, Template, parse, parse_template

_NOT_CAPTURED = (
    ("backend != 'cuda'", "CUDA graphs need CUDA devices, not backend={backend}"),
    (
        "routing == 'learned' and not has_capacity and ep > 1",
        "with routing=learned the host waits in every layer for the sizes of the messages to experts; capacity_factor "
        "would fix them",
    ),
    (
        "routing == 'learned' and not has_capacity and precision in ('fp16', 'fp32', 'fp64')",
        "with routing=learned in precision={precision} the host waits in every layer for the sizes of the experts' "
        "products; capacity_factor would fix them",
    ),
)
"""(condition, reason) in the language of the rules; the first that holds counts."""


def _cases() -> tuple[tuple[str, str, str], ...]:
    cases, others = [], "cuda_graph == 'step' and engine == 'ultrasweep'"
    for condition, reason in _NOT_CAPTURED:
        cases.append(
            ("cuda_graph", f"{others} and ({condition})", f"cuda_graph=step: {reason}; use cuda_graph=none or auto")
        )
        others += f" and not ({condition})"
    return tuple(cases)


CAPTURE_CASES = _cases()
"""(name, condition that breaks the rule, sentence); at most one is broken at a time."""


@lru_cache(maxsize=1)
def _parsed() -> tuple[tuple[Expression, Template], ...]:
    return tuple(
        (parse(condition, "cuda_graph"), parse_template(reason, "cuda_graph")) for condition, reason in _NOT_CAPTURED
    )


def is_captured(experiment: Experiment, backend: str = "cuda") -> bool:
    """Whether the timed steps of a measured run are replays."""
    asked = experiment.cuda_graph != "none" and experiment.engine == ENGINE
    return asked and not_captured(experiment, backend) is None


def not_captured(experiment: Experiment, backend: str) -> str | None:
    """Why a step of this experiment cannot be captured on devices of ``backend``; None if it can."""
    names = {**dict(zip(LAYOUT_NAMES, layout_values(experiment), strict=True)), "backend": backend}
    return next((reason.fill(names) for condition, reason in _parsed() if condition.evaluate(names)), None)
