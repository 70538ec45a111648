"""What the commands of this project share in reading their arguments: one line for a mistake, paths, lists of names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from results.errors import UltrasweepError


class InvalidOption(UltrasweepError):
    """A value on the command line that cannot be."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `InvalidOption` with one line for a mistake, instead of printing and leaving the program."""

    def error(self, message: str) -> NoReturn:
        raise InvalidOption(f"{message}; see {self.prog} --help")


def path(text: str) -> Path:
    """For ``type=``: a path that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty path; write . for the current folder")
    return Path(text)


def names(text: str) -> tuple[str, ...]:
    """For ``type=``: names with commas between, each once, in their order; at least one."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} contains no name")
    return found


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """For ``type=``: `names`, each of which is one of ``known``."""

    def known_names(text: str) -> tuple[str, ...]:
        found = names(text)
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return found

    return known_names
