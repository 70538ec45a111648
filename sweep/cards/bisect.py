"""``verify --bisect GOOD..BAD``: finds the first commit whose code fails a card, with git bisect in a scratch
worktree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from results.errors import UltrasweepError
from results.text.printable import printable
from sweep.cards.card import Card
from sweep.cards.judge import judge
from sweep.cards.verify import arguments_of

CodeRunner = Callable[[Path, Card], Mapping[str, Any] | None]
"""Runs a card with the code in a folder. Returns its row, or None if that code cannot run it."""


def run_code(
    root: Path, card: Card, overrides: Sequence[str], results: Path, conf: Sequence[Path] = ()
) -> Mapping[str, Any] | None:
    """Runs the card with the code of ``root``, and the user's folders ``conf``, in a separate process. The row is read
    by this program's code."""
    from results.tables.store import read_attempts

    name = f"bisect-{len(list(results.iterdir())) if results.is_dir() else 0}"
    words = ["run", "--plain", *arguments_of(card, overrides), f"results_dir={results}", f"name={name}"]
    words += [word for folder in conf for word in ("--conf", str(folder.resolve()))]
    # The code's folder comes first, before anything installed or named by the user.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "sweep", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    folder = results / name
    rows = read_attempts(folder).to_pylist() if (folder / "sweep.json").is_file() else []
    return max(rows, key=lambda row: str(row["started_at"] or "")) if rows else None


def first_slower(repository: Path, commits: str, card: Card, run: CodeRunner) -> str:
    """``GOOD..BAD``: the first commit after GOOD that fails the card, as a line of ``git log --oneline``.

    A commit whose code cannot run the card is skipped. The worktree is removed at the end. Raises `UltrasweepError` if
    GOOD fails, if BAD passes, and for unknown commits.
    """
    good, dots, bad = commits.partition("..")
    if not (good and dots and bad) or bad.startswith("."):
        raise UltrasweepError(f"--bisect {commits}: expected GOOD..BAD, two commits")
    scratch = Path(tempfile.mkdtemp(prefix="ultrasweep-bisect-"))
    tree = scratch / "code"
    good, bad = (_git(repository, "rev-parse", "--verify", f"{name}^{{commit}}").strip() for name in (good, bad))
    _git(repository, "worktree", "add", "--quiet", "--detach", str(tree), bad)
    try:
        for commit, expected in ((good, True), (bad, False)):
            _git(tree, "checkout", "--quiet", "--detach", commit)
            if (passed_at_end := _passes(tree, commit, card, run)) is not expected:
                word = (
                    "cannot run the card"
                    if passed_at_end is None
                    else "passes the card"
                    if passed_at_end
                    else "fails the card"
                )
                name = "GOOD" if expected else "BAD"
                raise UltrasweepError(f"--bisect {commits}: {name} {word}; GOOD must pass and BAD must fail")
        bisect_output = _git(tree, "bisect", "start", bad, good)
        while "is the first bad commit" not in bisect_output:
            if "only 'skip'ped commits left" in bisect_output.lower():
                raise UltrasweepError(f"--bisect {commits}: the remaining commits cannot run the card")
            commit = _git(tree, "rev-parse", "HEAD").strip()
            passed = _passes(tree, commit, card, run)
            bisect_output = _git(tree, "bisect", "skip" if passed is None else "good" if passed else "bad", fails=False)
        first = next(line for line in bisect_output.splitlines() if "is the first bad commit" in line).split()[0]
        return _git(repository, "log", "--oneline", "-1", first).strip()
    finally:
        _git(repository, "worktree", "remove", "--force", str(tree), fails=False)
        shutil.rmtree(scratch, ignore_errors=True)


def _passes(tree: Path, commit: str, card: Card, run: CodeRunner) -> bool | None:
    row = run(tree, card)
    judgement = judge(card, row) if row is not None else None
    word = "skipped: it cannot run the card" if judgement is None else "pass" if judgement.passed else "FAIL"
    print(printable(f"{commit[:10]} {word}{': ' + judgement.lines[0] if judgement else ''}"), flush=True)
    return judgement.passed if judgement else None


def _git(where: Path, *arguments: str, fails: bool = True) -> str:
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, check=False)
    if done.returncode and fails:
        raise UltrasweepError(f"git {arguments[0]}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout
