"""``card`` and ``verify``: bands by hand, and what a failed card gives as reasons."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from results.errors import InvalidResults, UltrasweepError
from results.tables.store import read_attempts
from sweep.__main__ import main
from sweep.cards.card import Band, Card, read_cards, to_yaml
from sweep.cards.judge import judge
from sweep.cards.make import make_card, make_cards
from sweep.cards.verify import (
    announce_bisect,
    announcement,
    arguments_of,
    print_judgement,
    selected,
    split_arguments,
    verify_cards,
)
from sweep.inspecting.lookup import Record, Results
from tests.sweep.engine_configs.layouts import layout
from tests.sweep.helpers import plan_of, store_attempt

EXPERIMENT = layout("llama8b", dp=4, zero_stage=2, micro_batch_size=2, global_batch_size=32)
BAND = {"value": 2.0, "low": 1.0, "high": 3.0}
ROW: Mapping[str, Any] = {
    "step_time_s": 2.0,
    "step_time_min_s": 1.99,
    "step_time_max_s": 2.01,
    "step_time_std_s": 0.04,
    "tokens_per_s_per_gpu": 32 * 4096 / 2.0 / 4,
    "warmup_steps": 3,
    "timed_steps": 5,
    "cluster": "h200",
    "peak_allocated_bytes": 90 * 10**9,
    "device_name": "NVIDIA H200",
    "backend": "cuda",
    "sm_clock_mhz": 1500.0,
    "torch_version": "2.11.0",
    "nccl_version": "2.28.9",
    "git_commit": "a" * 40,
    "git_dirty": False,
    "check_matmul_flops": 7e14,
    "check_all_reduce_between_nodes_bytes_per_s": 9e10,
}


def stored(folder: Path, *rows: Mapping[str, Any]) -> Record:
    for row in rows:
        store_attempt(folder, EXPERIMENT, **{**ROW, **row})
    attempts = read_attempts(folder).to_pylist()
    return Record(id=EXPERIMENT.id, experiment=EXPERIMENT, ledger=(), attempts=tuple(attempts))


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return make_card(stored(tmp_path / "own", {}))


@pytest.fixture
def row(tmp_path: Path, card: Card) -> dict[str, Any]:
    """The row that the card was made of."""
    return dict(read_attempts(tmp_path / "own").to_pylist()[0])


def test_band_of_steps_by_hand(card: Card) -> None:
    """Five steps of 2 % and one run: Student's t of 4 degrees at 99.5 % is 4.604, times sqrt(2) for one run more."""
    band = card.expected["step_time_s"]
    assert band.value == 2.0 and band.high is not None and band.low is not None
    assert band.high == pytest.approx(2.0 * (1 + 4.604 * 0.02 * 2**0.5), rel=2e-3)
    assert band.low == pytest.approx(4.0 - band.high)
    tokens = card.expected["tokens_per_s_per_gpu"]
    assert tokens.value == 16384 and tokens.low == pytest.approx(32 * 4096 / 4 / band.high)
    assert card.expected["peak_allocated_bytes"] == Band(value=90e9, low=pytest.approx(89.1e9), high=90.9e9)
    assert "peak_reserved_bytes" not in card.expected
    assert card.bands_from == "timed steps of 1 run" and card.verified == {"NVIDIA H200": None}


def test_band_of_repeats_by_hand(tmp_path: Path) -> None:
    """Six runs, 1.98 to 2.03: t of 5 degrees at 99.5 % is 4.032, times sqrt(1 + 1/6)."""
    times = [1.98, 1.99, 2.00, 2.01, 2.02, 2.03]
    card = make_card(stored(tmp_path / "own", *({"step_time_s": time} for time in times)))
    band = card.expected["step_time_s"]
    deviation = (sum((time - 2.005) ** 2 for time in times) / 5) ** 0.5
    assert band.high == pytest.approx(2.005 + 4.032 * deviation * (7 / 6) ** 0.5, rel=1e-3)
    assert card.bands_from == "6 repeats" and len(card.attempts) == 6


def test_other_devices_and_repeated_rows_are_no_repeats(tmp_path: Path) -> None:
    card = make_card(stored(tmp_path / "own", {"device_name": "NVIDIA H100"}, {"repeat_of": "x"}, {}))
    assert len(card.attempts) == 1


def test_a_steady_run_gets_the_least_band(tmp_path: Path) -> None:
    card = make_card(stored(tmp_path / "own", {"step_time_std_s": 0.0}))
    assert card.bands_from == "timed steps of 1 run, at least 3%"
    assert card.expected["step_time_s"].high == pytest.approx(2.06)


def test_without_spread_nothing_is_judged(tmp_path: Path) -> None:
    record = stored(tmp_path / "own", {"timed_steps": 1, "step_time_std_s": None, "peak_allocated_bytes": None})
    card = make_card(record)
    assert card.expected["step_time_s"] == Band(value=2.0, low=None, high=None)
    found = judge(card, record.attempts[0])
    assert not found.passed and found.lines[-1].startswith(
        "nothing could be judged: the card has no bands (no band: one"
    )


def test_a_band_that_holds_nearly_any_run_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of 20 %: Student's t of one degree makes ± 1,800 % of it, down to a negative time."""
    record = stored(tmp_path / "own", {"timed_steps": 2, "step_time_std_s": 0.4})
    card = make_card(record)
    assert card.expected["step_time_s"] == Band(value=2.0, low=None, high=None)
    assert card.expected["tokens_per_s_per_gpu"].low is None and card.expected["peak_allocated_bytes"].low is not None
    assert card.bands_from.startswith("no band: timed steps of 1 run give ± ") and "± 50%" in card.bands_from
    print_judgement(judge(card, record.attempts[0]))
    assert capsys.readouterr().out.startswith(f"pass: {card.id} (not judged: step time, tokens/s/GPU)\n")
    assert main(["card", record.id, "--results", str(tmp_path)]) == 0
    assert f"warning: {card.id}: no band: timed steps of 1 run" in capsys.readouterr().err


def test_peaks_far_apart_give_no_band(tmp_path: Path) -> None:
    peaks = ({"peak_allocated_bytes": size * 10**9} for size in (30, 30, 90))
    assert make_card(stored(tmp_path / "own", *peaks)).expected["peak_allocated_bytes"].high is None


def test_a_wide_band_of_an_older_card_is_named(card: Card, row: dict[str, Any]) -> None:
    bands = {"step_time_s": Band(value=0.73, low=-0.082, high=1.547)}
    found = judge(dataclasses.replace(card, expected=bands), {**row, "step_time_s": 1.5})
    assert not found.passed and "no band, since its low end is below 0: not judged" in found.lines[0]
    bands = {"step_time_s": Band(value=0.73, low=0.1, high=1.36)}
    found = judge(dataclasses.replace(card, expected=bands), {**row, "step_time_s": 1.3})
    assert found.lines[0].endswith("within 100.0 ms to 1,360.0 ms (a wide band, in which nearly any run lies)")


def test_no_card_without_a_finished_attempt(tmp_path: Path) -> None:
    record = stored(tmp_path / "own", {"outcome": "oom", "step_time_s": None})
    with pytest.raises(InvalidResults, match=r"has no finished attempt to make a card of \(oom\)"):
        make_card(record)


def test_the_same_row_passes(card: Card, row: dict[str, Any]) -> None:
    found = judge(card, row)
    assert found.passed and found.reasons == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sm_clock_mhz": 1200.0}, "slower clock: 1,200 MHz, the card 1,500 MHz (-20.0%)"),
        ({"torch_version": "2.13.0"}, "other torch version: 2.13.0, the card 2.11.0"),
        ({"nccl_version": "2.29.1"}, "other nccl version: 2.29.1, the card 2.28.9"),
        ({"git_commit": "b" * 40}, f"other git commit: {'b' * 10}, the card {'a' * 10}"),
        ({"device_name": "NVIDIA H100"}, "other device: NVIDIA H100, the card NVIDIA H200"),
        ({"check_matmul_flops": 5.6e14}, "slower device: its matrix products reach 80% of the card's"),
        (
            {"check_all_reduce_between_nodes_bytes_per_s": 1.8e10},
            "other network between nodes: its all-reduce reach 20% of the card's",
        ),
        ({"throttle_reasons": "hw_thermal_slowdown"}, "throttled: hw_thermal_slowdown"),
        ({"method": "rehearsed"}, "other method: rehearsed, the card measured"),
        ({"git_dirty": True}, "uncommitted changes"),
    ],
)
def test_reasons(card: Card, row: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    found = judge(card, {**row, "step_time_s": 3.0, "tokens_per_s_per_gpu": 10922.0, **changes})
    assert not found.passed and found.reasons == (reason,)
    assert "outside 1,740.1 ms" in found.lines[0] and "(+50.0%)" in found.lines[0]


def test_more_memory_fails_and_faster_passes(card: Card, row: dict[str, Any]) -> None:
    assert not judge(card, {**row, "peak_allocated_bytes": 92 * 10**9}).passed
    fast = judge(card, {**row, "step_time_s": 1.0, "tokens_per_s_per_gpu": 32768.0})
    assert fast.passed and "better than" in fast.lines[0]
    assert not judge(card, {**row, "peak_allocated_bytes": None}).passed
    died = judge(card, {**row, "outcome": "oom", "evidence": "OutOfMemoryError"})
    assert not died.passed and died.lines == ("oom, not ok: OutOfMemoryError",)


def test_other_configuration_is_named(card: Card, row: dict[str, Any]) -> None:
    other = EXPERIMENT.replace(recompute="full")
    from workloads.spec import experiment as ex

    found = judge(card, {**row, "config_json": ex.to_json(other)})
    assert found.reasons == ("other configuration: recompute=full, the card recompute=none",)


def test_card_survives_its_file(card: Card, tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text(to_yaml([card, dataclasses.replace(card, method="rehearsed")]))
    assert read_cards(tmp_path / "card.yaml")[0] == card
    assert [found.method for _, found in selected([tmp_path / "card.yaml"], "llama8b")] == ["measured", "rehearsed"]
    with pytest.raises(InvalidResults, match="--only qwen: none of the 2 cards"):
        selected([tmp_path / "card.yaml"], "qwen")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no card"),
        ("{", ", line 2: while parsing a flow node"),
        ("- " * 500 + "x", "it is nested too deeply"),
        ("format: &a [*a]", "an alias refers to a value that contains it"),
        ("a0: &a0 [1, 2, 3]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 18)), "aliases"),
        ("format: 1\nid: 2026-01-01", "id=datetime.date(2026, 1, 1) is a date; if it is text, put it in quotes"),
        ("1: 2", "has the name 1; a name is text"),
        ("[1, 2]", "is not a card"),
        ("format: 7", "a card of format 7; this program reads format 1"),
        ("format: 1\nid: x", "unknown or missing in the card: attempts, "),
    ],
)
def test_what_is_no_card(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(text)
    assert main(["verify", str(path)]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expected": {"step_time_s": 2.0}}, "expected must give each column a value, a low and a high"),
        ({"machine": []}, "machine must be a mapping"),
        ({"machine": {"sm_clock_mhz": "fast"}}, "machine.sm_clock_mhz='fast' must be a number or null"),
        ({"machine": {"device_name": ["a"]}}, r"machine.device_name=\['a'\] must be a single value"),
        ({"id": "x-${oc.env:HOME}"}, "is not the id of an experiment"),
        ({"id": 7}, "id=7 must be text"),
        ({"cluster": "${oc.env:HOME}"}, r"cluster holds '\$\{oc.env:HOME\}'; a card may not refer to other values"),
        ({"cluster": ["h200"]}, r"cluster=\['h200'\] must be text or null"),
        ({"method": "guessed"}, "method='guessed' may be measured, rehearsed"),
        ({"attempts": 3}, "attempts must be a list of texts"),
        ({"timed_steps": True}, "timed_steps=True must be a whole number of at least 1"),
        ({"warmup_steps": int("9" * 400)}, r"warmup_steps=9+… must be a number of at most 1e\+30"),
        ({"verified": {"NVIDIA H200": 1}}, "verified.NVIDIA H200=1 must be a mapping or null"),
        ({"expected": {"device_name": BAND}}, "expected.device_name is no column that a run measures in numbers"),
        ({"expected": {"step_time_s": {**BAND, "value": 0}}}, "step_time_s.value=0 must be a number above 0"),
        ({"expected": {"step_time_s": {**BAND, "low": "1"}}}, "step_time_s.low='1' must be a number"),
        ({"expected": {"step_time_s": {**BAND, "high": float("inf")}}}, r"step_time_s.high=inf must be a number of at"),
        ({"expected": {"step_time_s": {**BAND, "low": 4}}}, "step_time_s: low=4 is above high=3"),
        ({"configuration": {"tp": 1}}, "configuration: stored experiment has unknown or missing fields"),
    ],
)
def test_a_card_edited_wrongly(change: dict[str, Any], message: str, card: Card, tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "card.yaml"
    path.write_text(yaml.safe_dump({**next(yaml.safe_load_all(to_yaml([card]))), **change}))
    with pytest.raises(InvalidResults, match=message):
        read_cards(path)


def test_no_field_of_a_card_may_be_of_another_type(card: Card, tmp_path: Path) -> None:
    """Each field in turn becomes a value of another type: a card either is refused in one line, or means the same."""
    import yaml

    document = next(yaml.safe_load_all(to_yaml([card])))
    path = tmp_path / "card.yaml"

    def read(changed: Mapping[str, Any]) -> None:
        path.write_text(json.dumps(changed))
        try:
            read_cards(path)
        except InvalidResults as error:
            assert "\n" not in str(error)

    for odd in ([], {"a": -1.5}):
        for name in document:
            read({**document, name: odd})
        for name in document["configuration"]:
            read({**document, "configuration": {**document["configuration"], name: odd}})
        model = document["configuration"]["model"]
        for name in model:
            read({**document, "configuration": {**document["configuration"], "model": {**model, name: odd}}})


def test_what_will_run_and_its_price_are_shown_first(card: Card) -> None:
    plan = plan_of(arguments_of(card, ["launcher=slurm", "launcher.partition=main"]))
    prepared = SimpleNamespace(plan=plan)
    told = announcement(card, prepared)  # type: ignore[arg-type]
    assert told.startswith(f"to run: {card.id}: 4 devices of h200, 3 + 5 steps, about 0.")
    assert "device-hours, at most " in told
    long = dataclasses.replace(card, timed_steps=10**9)
    with pytest.raises(
        InvalidResults, match=r"timed_steps=1000000000, more than 10,000; give .* measure.timed_steps=N"
    ):
        announce_bisect(long, [])
    announce_bisect(long, ["measure.timed_steps=5"])


def test_arguments(tmp_path: Path, card: Card) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(to_yaml([card]))
    assert split_arguments([str(path), "launcher=slurm"]) == ([path], ["launcher=slurm"])
    for wrong in ([], ["launcher=slurm"], ["missing.yaml"]):
        with pytest.raises(UltrasweepError, match=r"python -m sweep card ID --out FILE.yaml"):
            split_arguments(wrong)
    words = arguments_of(card, ["cluster=h100_efa", "launcher=slurm"])
    assert words[-2:] == ["cluster=h100_efa", "launcher=slurm"] and "cluster=h200" not in words
    with pytest.raises(UltrasweepError, match="verify names the sweep of each card itself; leave"):
        arguments_of(card, ["name=mine"])


def test_judged_by_a_runner_and_noted(tmp_path: Path, card: Card, row: dict[str, Any]) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(to_yaml([card]))
    slow = {**row, "step_time_s": 3.0, "tokens_per_s_per_gpu": 10922.0}
    assert not verify_cards([(path, card)], [], lambda *_: slow, write=True)
    assert read_cards(path)[0].verified == {"NVIDIA H200": None}
    other = {**row, "device_name": "NVIDIA H100", "step_time_s": 1.9, "tokens_per_s_per_gpu": 17246.0}
    assert verify_cards([(path, card)], [], lambda *_: other, write=True)
    noted = read_cards(path)[0].verified
    assert noted["NVIDIA H200"] is None and noted["NVIDIA H100"] is not None
    assert noted["NVIDIA H100"]["git_commit"] == "a" * 40 and noted["NVIDIA H100"]["step_time_s"] == 1.9


def test_one_that_cannot_run_does_not_stop_the_others(
    tmp_path: Path, card: Card, row: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wide = dataclasses.replace(card, id="wide")

    def run(card: Card, overrides: Sequence[str]) -> Mapping[str, Any]:
        if card.id == "wide":
            raise UltrasweepError("needs 512 GPUs, 2 are here")
        return row

    path = tmp_path / "card.yaml"
    assert not verify_cards([(path, wide), (path, card)], [], run, write=False)
    told = capsys.readouterr().out
    assert "not run: wide\n  needs 512 GPUs, 2 are here\n" in told
    assert f"pass: {card.id}" in told and "1 of 2 cards passed" in told
    with pytest.raises(UltrasweepError, match="needs 512"):
        verify_cards([(path, wide)], [], run, write=False)


def test_odd_rows_are_no_reason_to_make_no_cards(tmp_path: Path) -> None:
    for number, odd in enumerate(({}, {"config_json": "[" * 5000}, {"step_time_s": -1.0}, {"step_time_min_s": 0.0})):
        store_attempt(tmp_path / "s", EXPERIMENT.replace(seed=number), **{**ROW, "step_time_std_s": None, **odd})
    assert {card.experiment.seed for card in make_cards(Results(tmp_path / "s"))} == {0, 3}


def test_a_card_of_one_point_or_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["card"]) == 2
    assert main(["card", "295a90f3", "--all"]) == 2
    assert capsys.readouterr().err.count("card takes either an experiment's id or --all") == 2
    (tmp_path / "results").mkdir()
    assert main(["card", "--all", "--results", str(tmp_path / "results")]) == 2
