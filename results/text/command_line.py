"""Argument parsing that all commands share: one line for a mistake, paths, lists of names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from results.errors import UltrasweepError


class InvalidOption(UltrasweepError):
    """A value on the command line is not allowed."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `InvalidOption` with one line for a mistake, instead of printing a message and exiting."""

    def error(self, message: str) -> NoReturn:
        raise InvalidOption(f"{message}; see {self.prog} --help")


def path(text: str) -> Path:
    """Converter for ``type=``: a path that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty path; write . for the current folder")
    return Path(text)


def names(text: str) -> tuple[str, ...]:
    """Converter for ``type=``: names separated by commas, without repetitions, in their order; at least one."""
    unique = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not unique:
        raise argparse.ArgumentTypeError(f"{text!r} contains no name")
    return unique


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Converter for ``type=``: as `names`, and each name must be in ``known``."""

    def known_names(text: str) -> tuple[str, ...]:
        chosen = names(text)
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return chosen

    return known_names
