"""Asks this machine what it is like, with the program that the doctor runs on a compute node."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path

from launchers.doctor import on_node
from launchers.doctor.answers import answer_seen, parse_answer
from launchers.doctor.checks import Answer
from results.errors import UltrasweepError
from results.shared_filesystem.whole_files import write_whole


def ask_this_machine(folder: Path, limit_s: float) -> Answer:
    """The answer of this machine within ``limit_s`` seconds. ``folder``: a new folder below the one of the sweeps.

    Raises `UltrasweepError` if the folder cannot be written, or the program does not answer.
    """
    token = secrets.token_hex(8)
    try:
        folder.mkdir(parents=True)
        write_whole(folder / on_node.REQUEST, token)
        write_whole(folder / on_node.CLOCK, repr(time.time()))
    except OSError as error:
        raise UltrasweepError(f"cannot write in {folder}: {error.strerror or error}") from None
    command = [sys.executable, "-", str(folder.absolute()), token]
    try:
        with Path(on_node.__file__).open("rb") as program:
            done = subprocess.run(
                command, stdin=program, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace"
            )
    except subprocess.TimeoutExpired:
        raise UltrasweepError(
            f"this machine did not answer within {limit_s:.0f} s; --wait SECONDS waits longer"
        ) from None
    read_at = time.time()
    for line in done.stdout.splitlines():
        if (facts := parse_answer(line, token)) is not None:
            return Answer(facts=facts, read_at=read_at, file_seen=answer_seen(folder, facts, token))
    raise UltrasweepError(f"this machine did not answer: {done.stderr.strip()[-300:] or 'no output'}")
