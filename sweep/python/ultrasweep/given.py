"""What users give to the interface's functions, as the words and folders that commands take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from results.errors import UltrasweepError
from sweep.composing.conffiles import ConfFolders
from sweep.composing.words import word

Conf = str | Path | Sequence[str | Path]


def folders(conf: Conf) -> ConfFolders:
    """One or several folders of the user's grid/, model/, cluster/ ... files. Raises `InvalidSweep` for a missing
    one."""
    given = [conf] if isinstance(conf, str | Path) else conf
    return ConfFolders(tuple(Path(folder) for folder in given))


def words(options: Mapping[str, object]) -> list[str]:
    """Overrides of a command line for options by their names. Options that are None are left out."""
    return [word(name, value) for name, value in options.items() if value is not None]


def changes(overrides: Mapping[str, object] | None) -> list[str]:
    """Overrides of any option by its dotted name; here None is a value, ``null``."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise UltrasweepError(f"overrides={overrides!r}: give a mapping, such as {{'plan.oom_margin': 1.2}}")
    return [word(name, value) for name, value in (overrides or {}).items()]


def several(name: str, values: str | Sequence[str]) -> list[str]:
    """One text or several. Raises `UltrasweepError` for anything else."""
    texts = [values] if isinstance(values, str) else list(values)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UltrasweepError(f"{name}={values!r}: give a name, or a list of names")
    return texts


def path(name: str, value: str | Path) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise UltrasweepError(f"{name}={value!r}: give the path of a folder or file")
    return Path(value)


def frame_of_rows(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """Rows with equal keys as a frame in which an unknown number is null. Without rows it has no column."""
    return pd.DataFrame.from_records(rows).convert_dtypes() if rows else pd.DataFrame()
