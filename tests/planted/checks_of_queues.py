"""A check of what a search keeps in its queue, against what it should choose by the rows and claims alone."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from launchers.state.queue import QueueReader
from sweep.searching.feeding import Feeder
from sweep.searching.rounds import next_points, read_round
from tests.planted.plant import Fault, planted
from tests.pool import Pool
from tests.sweep.searching.test_feeding import SideBySide, feeder
from tests.sweep.searching.test_run import off, searched
from workloads.spec.experiment import layout_id


def feeds(pool: Pool, fault: Fault | None) -> None:
    """After every end the queue holds what promises most beside what runs, within the budget."""
    del pool
    with tempfile.TemporaryDirectory() as folder:
        search = searched(Path(folder), "grid.axes.tp=[1,2]", "grid.axes.pp=[1]")
        right, queued = feeder(search)
        settings = search.prepared.plan.config.search
        (cell,) = search.planned.names
        costs = {p.experiment.id: p.price.charged_h for p in search.planned.points if p.price is not None}
        right.look()
        reader = QueueReader(queued.sweep, "pilot", lambda line: None)
        claims = [claim for _ in range(2) if (claim := reader.claim_next(lambda found: found))]
        cluster = SideBySide(search, off)
        for turn in range(3):
            cluster.end(queued, claims.pop(0))
            now = read_round(queued.sweep, search.planned, settings, "measured")
            wanted = next_points(now, settings)
            best = now.session.best(cell)
            assert best is not None
            with planted(fault):
                right.feed()
            waiting = QueueReader(queued.sweep, "", lambda line: None).waiting()
            assert [layout_id(one.experiment) for one in waiting] == [layout_id(one.point.experiment) for one in wanted]
            limit = 1.5 * math.exp(float(now.session.seen.log_time[best]))
            assert all(one.slow_step_s is not None and math.isclose(one.slow_step_s, limit) for one in waiting), turn
            claim = reader.claim_next(lambda found: found)
            assert claim is not None
            claims.append(claim)
        # With little left, only what the running points leave of it is spent.
        running = sum(costs[claim.point.experiment.id] for claim in claims)
        left = Feeder(queued.sweep, search.planned, settings, "measured", now.spent + running + 0.001)
        with planted(fault):
            look = left.look()
        assert look.over_budget and not look.chosen
        assert not QueueReader(queued.sweep, "", lambda line: None).waiting()
