"""Faults in what is recommended: ``advise`` and ``search``."""

from __future__ import annotations

from tests.planted.faults import faults_of
from tests.planted.plant import Fault

RANKING = "sweep.advising.ranking:Ranking."
CHOICE = "sweep.searching.choice:"
CHECKED = "sweep.searching.checked:"
FEEDER = "sweep.searching.feeding:Feeder."
SESSION = "sweep.searching.session:Session."

CHOICES: list[Fault] = [
    *faults_of(
        "choices",
        (
            "advice_that_does_not_fit",
            "a layout is recommended whatever memory it needs",
            RANKING + "fitting",
            "memory.peak_bytes > self.limit_bytes",
            "False",
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
            "states = (g + (1 - q.optimizer_offload) * update.least_moments * update.moment_bytes) * own",
            "states = 30 * (g + update.least_moments * update.moment_bytes) * own",
            {},
        ),
        check="advice",
    ),
    *faults_of(
        "choices",
        (
            "budget_of_tensors_alone",
            "a budget is compared with what is allocated, not with what is reserved",
            "sweep.planning.auto_recompute:tensor_limit",
            "- cluster.reserved_bytes - cluster.device.workspace_bytes",
            "",
            {},
        ),
        (
            "budget_of_the_next_stage",
            "the peak of a stage is taken for its neighbour's",
            "workloads.predict.fitting_recompute:_Stages.peak",
            "rank_peak_bytes(self._written[text], rank)",
            "rank_peak_bytes(self._written[text], min(rank + 1, self.e.pp - 1))",
            {},
        ),
        check="budgets",
    ),
    *faults_of(
        "choices",
        (
            "search_never_doubts",
            "a search ends with its first batch",
            CHOICE + "beaten",
            "return float(1 - missed * np.prod(1 - each[rest[counted[rest]]]))",
            "return 0.0",
            {},
        ),
        (
            "search_runs_again",
            "a layout that ran stays a candidate",
            CHOICE + "look",
            "seen.state[places] == RUNNING, np.isfinite(seen.residual[places])",
            "seen.state[places] == RUNNING, np.zeros(len(places), bool)",
            {},
        ),
        (
            "search_learns_nothing",
            "what ran does not move what is believed of layouts like it",
            "sweep.searching.surrogate:believe",
            "mean = space.log_time[places] + cross @ fitted.weighted",
            "mean = space.log_time[places]",
            {},
        ),
        check="searches",
    ),
    *faults_of(
        "choices",
        (
            "search_forgets_what_others_try",
            "what runs on one pilot is not counted on when another is given its point",
            CHOICE + "choose",
            "for one in np.flatnonzero(view.running):",
            "for one in ():",
            {},
        ),
        (
            "search_never_takes_back",
            "what was chosen before an end is run whatever that showed",
            FEEDER + "_change_queue",
            "if place not in stay:",
            "if place not in waits:",
            {},
        ),
        (
            "search_forgets_what_runs",
            "the budget is spent twice by points that run side by side",
            "sweep.searching.feeding:choose_points",
            "budget_gpu_hours - now.spent - sum(running)",
            "budget_gpu_hours - now.spent",
            {},
        ),
        (
            "search_looks_once",
            "nothing follows what ends",
            FEEDER + "feed",
            "if self._count() == before:",
            "if before:",
            {},
        ),
        (
            "search_ends_all_early",
            "whatever is slower than the fastest ends early",
            "sweep.searching.rounds:next_points",
            "slow_s = settings.slow * exp(",
            "slow_s = exp(",
            {},
        ),
        check="feeds",
    ),
    *faults_of(
        "choices",
        (
            "pilots_check_turned",
            "a run on slow devices is expected to be fast",
            CHECKED + "Checks.probed",
            "log(checked.step_time_s / usual.step_time_s)",
            "log(usual.step_time_s / checked.step_time_s)",
            {},
        ),
        (
            "pilots_of_all_sizes_mixed",
            "usual is what runs on any number of devices found",
            CHECKED + "Checks.__init__",
            "{key: median(values) for key, values in values_by_check.items()}",
            "{key: median(x for other in values_by_check if other[1] == key[1] for x in values_by_check[other])"
            " for key in values_by_check}",
            {},
        ),
        (
            "usual_is_the_fastest",
            "one fast pilot makes all others slow",
            CHECKED + "Checks.__init__",
            "median(values)",
            "max(values)",
            {},
        ),
        (
            "equal_pilots_differ",
            "the noise of a check is taken for a slower machine",
            CHECKED + "EQUAL",
            None,
            0.0,
            {},
        ),
        (
            "slow_pilots_are_equal",
            "a pilot of half the rate counts as usual",
            CHECKED + "EQUAL",
            None,
            1.0,
            {},
        ),
        (
            "links_mixed_up",
            "a slow link inside the node slows down what goes between nodes",
            CHECKED + "scaled",
            "inside=shares.get(INSIDE, 1.0)",
            "inside=shares.get(BETWEEN, 1.0)",
            {},
        ),
        (
            "slow_copies_ignored",
            "a device of slow memory counts as usual",
            CHECKED + "scaled",
            "times(cluster.device.memory_bandwidth, COPY)",
            "cluster.device.memory_bandwidth",
            {},
        ),
        (
            "slow_pilot_counted_twice",
            "what a slow pilot costs is put on top of what its layout missed",
            SESSION + "tell",
            "float(self.space.log_time[one]) + probed",
            "float(self.space.log_time[one]) - probed",
            {},
        ),
        (
            "slow_pilot_blamed_on_the_layout",
            "what a slow pilot costs stays in what its layout missed",
            SESSION + "tell",
            "float(self.space.log_time[one]) + probed",
            "float(self.space.log_time[one])",
            {},
        ),
        (
            "slow_pilot_surprises",
            "what a slow pilot costs makes every belief less certain",
            SESSION + "tell",
            "Surprise(log(step_time_s) - mean - probed,",
            "Surprise(log(step_time_s) - mean,",
            {},
        ),
        check="pilots",
    ),
]
