"""Plants one fault, and says which check finds it and which tensor is the first that it makes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.planted import checks
from tests.planted.plant import Fault, with_fault
from tests.pool import Pool, RankFailed
from tests.workloads.engine.parity import check_traces, experiment, recipe_of, train_rank, trained_reference
from workloads.parity.compare import HIGHER, Difference, compare, first_that_differs, noise_of
from workloads.parity.order import Computed, in_order
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import Precision

Check = Callable[[Pool, Fault | None], None]


@dataclass(frozen=True, slots=True)
class Finding:
    fault: Fault
    found_by: str | None
    """The check that must find it, and does; None: it does not."""
    first: Difference | None
    """The first tensor that differs from the unsharded model's; None: every number is right."""
    seconds: float


class Detector:
    """Shares the unsharded runs between faults."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._unsharded: dict[tuple[str, float, int], list[Computed]] = {}

    def find(self, fault: Fault, precision: Precision = "fp64") -> Finding:
        """Plant it. In other precisions than fp64 nothing but the comparison of layouts is asked."""
        start = time.perf_counter()
        case = experiment(**fault.layout).replace(precision=precision)
        body = partial(train_rank, with_activations=True)
        arguments = (case, fault.steps, "cpu", fault.scale)
        traces = self.pool.run(with_fault, case.world_size, fault, body, *arguments)
        noise = None
        left = self.unsharded(case, fault)
        if precision in HIGHER:
            higher = self.unsharded(case.replace(precision=HIGHER[precision]), fault)
            noise = noise_of(left, higher)
        first = first_that_differs(compare(left, in_order(case, traces), case, noise))
        found = None
        if precision != "fp64":
            found = "parity" if first is not None else None
        elif fault.check != "parity":
            found = fault.check if self.is_found_by(getattr(checks, fault.check), fault) else None
        else:
            model, batch = case.model, case.global_batch_size
            how = fault.scale, None, fault.steps
            expected = trained_reference(self.pool, "cpu", model, batch, case.seq_len, *how, **recipe_of(case))
            try:
                check_traces(case, traces, expected)
            except AssertionError:
                found = "parity"
        return Finding(fault, found, first, time.perf_counter() - start)

    def is_found_by(self, check: Check, fault: Fault) -> bool:
        """Raises `RankFailed` where a rank fails: then the fault could not be planted, or any run would find it."""
        try:
            check(self.pool, fault)
        except RankFailed:
            raise
        except AssertionError:
            return True
        return False

    def unsharded(self, case: Experiment, fault: Fault) -> list[Computed]:
        """What one rank computes without any fault."""
        alone = Experiment.canonical(
            model=case.model,
            global_batch_size=case.global_batch_size,
            seq_len=case.seq_len,
            precision=case.precision,
            seed=case.seed,
            optimizer=case.optimizer,
            routing=case.routing,
            routing_imbalance=case.routing_imbalance,
            capacity_factor=case.capacity_factor,
            documents=case.documents,
            micro_batch_size=case.micro_batch_size if case.capacity_factor is not None else 1,  # what is sent at once
        )
        key = alone.id, fault.scale, fault.steps
        if key not in self._unsharded:
            traces = self.pool.run(
                partial(train_rank, with_activations=True), 1, alone, fault.steps, "cpu", fault.scale
            )
            self._unsharded[key] = in_order(alone, traces)
        return self._unsharded[key]
