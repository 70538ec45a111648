"""Finds an experiment by its id (or a part of it) in the ledgers and rows of a results folder."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.errors import InvalidResults
from workloads.spec import experiment as ex
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything that a results folder has on one experiment. Rows are as stored."""

    id: str
    """Id as stored: rows of earlier engine versions keep their ids."""
    experiment: Experiment
    ledger: tuple[Mapping[str, Any], ...]
    attempts: tuple[Mapping[str, Any], ...]
    """Oldest first."""
    command: tuple[str, ...] = ()
    """Words of the command that ran the newest attempt or, without one, planned the point; empty: not known."""


class Results:
    """The ledgers and attempts below a folder (or in one ledger file), read once."""

    def __init__(self, path: Path) -> None:
        """Raises `InvalidResults` if there is no sweep and no ledger."""
        from results.tables.store import read_attempts, read_ledger

        if path.suffix == ".csv" and path.is_file():
            raise InvalidResults(f"{path}: points are read from a Parquet file, as plan --out plan.parquet writes it")
        self.path = path
        self._ledger = read_ledger(path)
        self._attempts = read_attempts(path) if path.is_dir() else None

    def ids(self) -> list[str]:
        experiment_ids = set(self._ledger["experiment_id"].to_pylist())
        if self._attempts is not None:
            experiment_ids |= set(self._attempts["experiment_id"].to_pylist())
        return sorted(id for id in experiment_ids if id)

    def find(self, id_part: str) -> Record:
        """The experiment whose id is or contains ``id_part``. Raises `InvalidResults` if none or several match."""
        ids = self.ids()
        matches = [id_part] if id_part in ids else [id for id in ids if id_part and id_part in id]
        matches = matches or self._stored_under(id_part)
        if len(matches) > 1:
            shown = ", ".join(matches[:4]) + (" ..." if len(matches) > 4 else "")
            raise InvalidResults(
                f"{id_part!r} is part of {len(matches):,} ids in {self.path}: {shown}; give more of it"
            )
        if not matches:
            raise InvalidResults(
                f"no experiment {id_part!r} among {len(ids):,} in {self.path}{self._hint(id_part, ids)}"
            )
        ledger, attempts = self._rows(self._ledger, matches[0]), self._rows(self._attempts, matches[0])
        attempts.sort(key=lambda row: str(row["started_at"] or ""))
        text = next((row["config_json"] for row in [*ledger, *attempts] if row["config_json"]), None)
        if text is None:
            raise InvalidResults(
                f"{matches[0]} in {self.path} was stored without its configuration (column config_json)"
            )
        try:
            experiment = ex.from_json(text)
        except InvalidExperiment as error:
            raise InvalidResults(f"{matches[0]} in {self.path}: {error}") from None
        return Record(
            id=matches[0],
            experiment=experiment,
            ledger=tuple(ledger),
            attempts=tuple(attempts),
            command=self._command(ledger, attempts),
        )

    def _command(self, ledger: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        if attempts:
            return _words(attempts[-1]["command"])
        if not self.path.is_dir():
            return _command_of_plan(self.path)
        from results.tables.store import sweep_dirs

        sweeps = {row["sweep"] for row in ledger}
        return next((_command_of_sweep(one) for one in sweep_dirs(self.path) if one.resolve().name in sweeps), ())

    def _stored_under(self, id_part: str) -> list[str]:
        """Ids of stored experiments that a new run would store under an id with ``id_part``."""
        stored: dict[str, str] = {}
        for table in (self._ledger, self._attempts):
            if table is not None:
                rows = zip(table["config_json"].to_pylist(), table["experiment_id"].to_pylist(), strict=True)
                stored |= {text: id for text, id in rows if text and id}
        return sorted({id for text, id in stored.items() if id_part and id_part in _new_id(text)})

    def _hint(self, id_part: str, ids: Sequence[str]) -> str:
        """End of a message: where else the experiment is, or may be."""
        from results.tables.store import shipped_sweep_dirs

        for folder in shipped_sweep_dirs(self.path):
            if id_part and any(id_part in id for id in Results(folder).ids()):
                return f"; it ships with the program: --results {shlex.quote(str(folder))}"
        close = difflib.get_close_matches(id_part, ids, n=1, cutoff=0.3)
        hint = f"; did you mean {close[0]}?" if close else ""
        if self.path.is_dir():
            hint += "; a point that was only planned is in a ledger: plan ... --out plan.parquet, then "
            hint += "--results plan.parquet"
        return hint

    @staticmethod
    def _rows(table: Any, experiment_id: str) -> list[Mapping[str, Any]]:
        if table is None:
            return []
        import pyarrow.compute as pc

        return list(table.filter(pc.equal(table["experiment_id"], experiment_id)).to_pylist())


def _command_of_plan(path: Path) -> tuple[str, ...]:
    """The words that a plan file keeps of its command; none if it does not have them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from results.tables.store import RUN_WORDS

    try:
        return _words(((pq.read_schema(path).metadata or {}).get(RUN_WORDS) or b"").decode())
    except (OSError, pa.ArrowException, ValueError):
        return ()


def _command_of_sweep(path: Path) -> tuple[str, ...]:
    """The words of the command that made a sweep; none if its file does not have them."""
    from launchers.state.sweep_dir import SweepDir

    try:
        words = SweepDir(path).settings().get("command")
    except (OSError, InvalidResults):
        return ()
    return tuple(map(str, words)) if isinstance(words, list) else ()


def _words(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError:
        return ()


def _new_id(config_json: str) -> str:
    """The id that a new run of a stored experiment gets; empty for a row that this version cannot read."""
    try:
        return ex.canonical_id(ex.from_json(config_json))
    except (InvalidExperiment, ValueError, TypeError, KeyError):
        return ""
