"""``verify``: runs the experiment of a card again, here or on Slurm, and judges the result."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results.errors import InvalidResults, UltrasweepError
from results.shared_filesystem.whole_files import write_whole
from results.tables.store import read_attempts
from results.text.numbers import plural
from results.text.printable import printable
from results.text.terminal import open_console
from sweep.cards.card import Card, read_cards, to_yaml
from sweep.cards.judge import Judgement, judge
from sweep.cards.make import overrides_of
from sweep.composing.conffiles import ConfFolders
from workloads.spec.checks import shown

if TYPE_CHECKING:
    from sweep.running.run import Prepared

MOST_STEPS = 10_000
"""A card of more warm-up or timed steps is run only if the user gives their number."""
Runner = Callable[[Card, Sequence[str]], Mapping[str, Any] | None]
"""Runs a card with the user's overrides and returns its row; None if it was only shown (``launcher.dry=true``)."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Splits the arguments into card files and overrides for all of them. Raises `UltrasweepError` without a card."""
    overrides = [word for word in arguments if "=" in word and not Path(word).exists()]
    files = [Path(word) for word in arguments if word not in overrides]
    if not files:
        raise UltrasweepError("no card given: `python -m sweep card ID --out FILE.yaml` writes one")
    for path in files:
        if not path.is_file():
            raise UltrasweepError(f"no card {path}: `python -m sweep card ID --out FILE.yaml` writes one")
    return files, overrides


def selected(files: Sequence[Path], only: str | None) -> list[tuple[Path, Card]]:
    """The cards of the files: all, or those whose id contains ``only``."""
    cards = [(path, card) for path in files for card in read_cards(path)]
    matching_cards = [(path, card) for path, card in cards if only is None or only in card.id]
    if not matching_cards:
        raise InvalidResults(f"--only {only}: none of the {len(cards)} cards has an id that contains it")
    return matching_cards


def arguments_of(card: Card, overrides: Sequence[str]) -> list[str]:
    """The arguments of `run` for a card. The user's overrides come last and win. Raises `UltrasweepError` for a
    name."""
    if any(word.lstrip("+").startswith("name=") for word in overrides):
        raise UltrasweepError(
            "verify names the sweep of each card itself; leave name=... out (results_dir may be given)"
        )
    row = {
        "cluster": card.cluster,
        "method": card.method,
        "warmup_steps": card.warmup_steps,
        "timed_steps": card.timed_steps,
    }
    words = overrides_of(card.experiment, row)
    given = {word.partition("=")[0] for word in overrides}
    return [*(word for word in words if word.partition("=")[0] not in given), *overrides]


def refuse_many_steps(card: Card, overrides: Sequence[str]) -> None:
    """Refuse a card of more than `MOST_STEPS` steps, unless the user gives their number. Raises `InvalidResults`."""
    given = {word.partition("=")[0] for word in overrides}
    for name in ("warmup_steps", "timed_steps"):
        count = getattr(card, name)
        if count > MOST_STEPS and f"measure.{name}" not in given:
            raise InvalidResults(
                f"{card.id}: the card asks for {name}={shown(count)}, more than {MOST_STEPS:,}; give your own number "
                f"with measure.{name}=N"
            )


def announcement(card: Card, prepared: Prepared) -> str:
    """What is about to run, and its price: ``to run: ID: 4 devices of h200, 3 + 5 steps, about 0.02 device-hours
    ...``."""
    plan = prepared.plan
    prices = [point.price for point in plan.to_run if point.price is not None]
    expected = [price.expected_h for price in prices if price.expected_h is not None]
    about = f"about {sum(expected):.2g}" if len(expected) == len(prices) else "an unknown number of"
    return (
        f"to run: {card.id}: {plural(sum(price.devices for price in prices), 'device')} of {plan.config.cluster.name}, "
        f"{plan.config.measure.in_words} steps, {about} device-hours, at most "
        f"{sum(price.worst_h for price in prices):.2g}"
    )


def announce_bisect(card: Card, overrides: Sequence[str]) -> None:
    """Print the command that a bisection runs for each commit. Raises `InvalidResults` as `refuse_many_steps` does."""
    refuse_many_steps(card, overrides)
    command = shlex.join(["python", "-m", "sweep", "run", *arguments_of(card, overrides)])
    print(printable(f"to run for each commit: {command}"), flush=True)


def run_card(card: Card, overrides: Sequence[str], folders: ConfFolders, live: bool | None, command: str) -> Any:
    """Run one card as a sweep of one point, ``verify-HASH-WHEN``. Returns its row, or None after a dry run. Raises
    `UltrasweepError` if it cannot run."""
    from sweep.running.run import enqueue, prepare
    from sweep.running.start import only_shown, start

    words = arguments_of(card, overrides)
    refuse_many_steps(card, overrides)
    if not any(word.startswith("results_dir=") for word in overrides):
        words.append("results_dir=results/verify")
    when = time.strftime("%Y%m%d-%H%M%S") + f"-{time.monotonic_ns() % 10**6:06d}"
    prepared = prepare([*words, f"name=verify-{card.id.rpartition('-')[2]}-{when}"], folders, [])
    if only_shown(prepared, open_console()):
        return None
    print(printable(announcement(card, prepared)), flush=True)
    queued = enqueue(prepared)
    summary = start(prepared, queued, live=live, command=command)
    if summary.interrupted:
        raise KeyboardInterrupt
    rows = read_attempts(queued.sweep.path).to_pylist()
    if not rows:
        raise UltrasweepError(f"{card.id}: nothing ran: {summary.message or queued.sweep.path}")
    return max(rows, key=lambda row: str(row["started_at"] or ""))


def verify_cards(cards: Sequence[tuple[Path, Card]], overrides: Sequence[str], run: Runner, write: bool) -> bool:
    """Run and judge one card after the other. Returns whether all passed. ``write``: record passes in the card files.
    Cards that were only shown are not judged.

    If one of several cards cannot run here, it counts as failed and the others still run; a single card raises its
    error.
    """
    passed = []
    for path, card in cards:
        try:
            row = run(card, overrides)
        except UltrasweepError as error:
            if len(cards) == 1:
                raise
            print(printable(f"not run: {card.id}\n  {' '.join(str(error).split())}", keep="\n"))
            passed.append(False)
            continue
        if row is None:
            continue
        judgement = judge(card, row)
        print_judgement(judgement)
        passed.append(judgement.passed)
        if write and judgement.passed:
            note_verified(path, card, row)
    if len(passed) > 1:
        print(f"{sum(passed)} of {len(passed)} cards passed")
    return all(passed)


def print_judgement(judgement: Judgement) -> None:
    alone = f" (not judged: {', '.join(judgement.not_judged)})" if judgement.passed and judgement.not_judged else ""
    print(printable(f"{'pass' if judgement.passed else 'FAIL'}: {judgement.card.id}{alone}"))
    for line in judgement.lines:
        print(printable(f"  {line}"))
    for reason in judgement.reasons:
        print(printable(f"  {'why' if not judgement.passed else 'note'}: {reason}"))
    if not judgement.passed and not judgement.reasons:
        print("  why: no recorded difference, so chance or the node; run it again, or use --bisect GOOD..BAD")


def note_verified(path: Path, card: Card, row: Mapping[str, Any]) -> None:
    """Record in the card's file on which device it passed, when, and with which code."""
    device = str(row["device_name"] or row["backend"] or "not known")
    verification = {
        "at": row["started_at"].isoformat() if row["started_at"] is not None else None,
        "git_commit": row["git_commit"],
        "step_time_s": row["step_time_s"],
    }
    cards = [
        dataclasses.replace(other, verified={**other.verified, device: verification})
        if (other.id, other.method) == (card.id, card.method)
        else other
        for other in read_cards(path)
    ]
    write_whole(path, to_yaml(cards))
