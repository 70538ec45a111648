"""Faults in what is recommended: ``advise`` and ``search``."""

from __future__ import annotations

from tests.planted.faults import faults_of
from tests.planted.plant import Fault

RANKING = "sweep.advising.ranking:Ranking."
CHOICE = "sweep.searching.choice:"

CHOICES: list[Fault] = [
    *faults_of(
        "choices",
        (
            "advice_that_does_not_fit",
            "a layout is recommended whatever memory it needs",
            RANKING + "_look",
            "memory.peak_bytes <= self.limit_bytes",
            "True",
            {},
        ),
        (
            "schedule_thought_slow",
            "schedules that fill a pipeline sooner are estimated as slow",
            RANKING + "_estimate",
            "left = FILL.get(group.schedule, 1.0 / group.virtual_stages)",
            "left = 50.0 if group.virtual_stages > 1 else 1.0",
            {},
        ),
        (
            "bound_above_what_is_needed",
            "the bound of memory rules out layouts that fit",
            "sweep.advising.floor:floor_of",
            "states = 3 * g",
            "states = 90 * g",
            {},
        ),
        check="advice",
    ),
    *faults_of(
        "choices",
        (
            "search_never_doubts",
            "a search ends with its first batch",
            CHOICE + "beaten",
            "return float(1 - (1 - better) * np.prod(1 - alone[rest]))",
            "return 0.0",
            {},
        ),
        (
            "search_runs_again",
            "a layout that ran stays a candidate",
            CHOICE + "look",
            "places = own[seen.state[own] == UNTRIED]",
            "places = own",
            {},
        ),
        (
            "search_learns_nothing",
            "what ran does not move what is believed of layouts like it",
            "sweep.searching.surrogate:believe",
            "mean = space.log_time[places] + cross @ (inverse @ residual)",
            "mean = space.log_time[places]",
            {},
        ),
        check="searches",
    ),
]
