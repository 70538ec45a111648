"""Hints for overrides that were typed with dashes, as other programs take them: ``--model llama8b``, ``--gpus=8``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_OF_SWEEPS = ("model", "cluster", "launcher", "measure", "name", "results_dir")
_TAKE_LAUNCHERS = ("plan", "run", "search", "probe", "verify")


def hint(command: str, message: str, arguments: Sequence[str]) -> str:
    """The end of the message about unrecognized arguments: how the first of them is written here; empty if unknown."""
    found = re.search(r"unrecognized arguments: --([a-z][a-z0-9_-]*)(?:=(\S*))?", message.partition("; see ")[0])
    if found is None:
        return ""
    given, value = found[1], found[2]
    if value is None:  # typed with a space, or without a value
        after = [next_word for word, next_word in pairwise(arguments) if word == f"--{given}"]
        value = after[0] if after and not after[0].startswith("-") else "VALUE"
    name = given.replace("-", "_")
    if command == "advise":
        from sweep.advising.question import KNOWN

        return f"write {name}={value}" if name in KNOWN else ""
    if command not in _TAKE_LAUNCHERS:
        return ""
    if name in _OF_SWEEPS:
        return f"write {name}={value}"
    if name == "grid":
        return f"write +grid={value}"
    from launchers.slurm.options import in_our_words

    return in_our_words(given, value)
