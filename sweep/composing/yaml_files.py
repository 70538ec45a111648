"""Reads YAML files of users and strangers: each mistake is one line with its place, and size and expansion are limited.

Configuration files are read as OmegaConf reads them (`read_yaml`), cards as plain YAML (`read_documents`).
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sweep.composing.ambiguous_scalars import refuse_ambiguous_scalars
from workloads.spec.checks import LARGEST, shown
from workloads.spec.errors import InvalidSweep

MOST_VALUES = 100_000
"""A file whose aliases (``*name``) stand for more values than this is refused."""
MOST_BYTES = 32 * 2**20
"""A larger file is refused."""
_DEEPEST = 100
"""Deepest nesting of brackets; PyYAML's time grows with its square."""
_SHIPPED = Path(__file__).parents[1] / "conf"
"""The folder whose files do not change while a process runs: each is parsed once."""
_INDENTED = re.compile(r"^[ \t?:-]{400}", re.MULTILINE)
"""A line that may nest blocks deeper than the parser's stack allows."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in ``path``, as OmegaConf reads YAML. An empty file is an empty mapping.

    Raises `InvalidSweep` with the file, and the line if known, for text that is not UTF-8 or not YAML, for anything but
    a mapping, for aliases that expand to more than `MOST_VALUES` values, and for every value that YAML 1.1 reads as
    another number or word (``0042``, ``16:00``, ``no``).
    """
    return copy.deepcopy(_read_once(path)) if path.is_relative_to(_SHIPPED) else _read(path)


@cache
def _read_once(path: Path) -> dict[str, Any]:
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with _one_line_errors(path):
        try:
            text = _checked_text(path)
            refuse_ambiguous_scalars(str(path), text)
            data = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        except OmegaConfBaseException as error:
            raise ValueError(str(error)) from None
    if not isinstance(data, dict):
        raise InvalidSweep(f"{path} does not hold a mapping")
    return {str(key): value for key, value in data.items()}


def read_documents(path: Path) -> list[Any]:
    """Every YAML document in ``path``, as plain data.

    Raises `InvalidSweep` as `read_yaml` does, and for a value that JSON cannot hold, such as a date without quotes or
    a number that is not finite.
    """
    import yaml

    with _one_line_errors(path):
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = list(yaml.load_all(_checked_text(path), Loader=loader))
        for document in documents:
            _refuse_odd_values(path, document)
    return documents


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    from yaml import MarkedYAMLError, YAMLError

    try:
        yield
    except InvalidSweep:
        raise
    except UnicodeDecodeError as error:
        raise InvalidSweep(f"{path} is not UTF-8 text (byte {error.start + 1} of it); save it as UTF-8") from None
    except MarkedYAMLError as error:
        raise InvalidSweep(f"{path}{_place(error)}") from None
    except RecursionError:  # nested by indentation
        raise InvalidSweep(f"{path}: it is nested too deeply") from None
    except (OSError, ValueError, YAMLError) as error:
        raise InvalidSweep(f"{path}: {' '.join(str(error).split())}") from None


def _checked_text(path: Path) -> str:
    """The text of ``path``, if parsing it takes bounded time and memory."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InvalidSweep(f"{path} has more than {MOST_BYTES // 2**20} MiB; it is no file of this program")
    text = content.decode("utf-8")
    _refuse_depth(path, text)
    _refuse_explosion(path, text)
    return text


def _refuse_odd_values(path: Path, value: Any, place: str = "") -> None:
    """Refuse what JSON cannot hold, and numbers beyond any use."""
    where = f"{path}: {place.lstrip('.')}" if place else f"{path}:"
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise InvalidSweep(f"{where} has the name {shown(key)}; a name is text: put it in quotes")
            _refuse_odd_values(path, entry, f"{place}.{key}")
    elif isinstance(value, list):
        for entry in value:
            _refuse_odd_values(path, entry, place)
    elif isinstance(value, (int, float)):
        if not abs(value) <= LARGEST:
            raise InvalidSweep(f"{where}={shown(value)} must be a number of at most {LARGEST:.0e}")
    elif value is not None and not isinstance(value, str):
        raise InvalidSweep(f"{where}={shown(value)} is a {type(value).__name__}; if it is text, put it in quotes")


def _place(error: Any) -> str:
    """Formats a PyYAML error as ``, line 3: while parsing a flow mapping: expected ...``."""
    mark = error.problem_mark or error.context_mark
    line = f", line {mark.line + 1}" if mark is not None else ""
    problem = ": ".join(" ".join(part.split()) for part in (error.context, error.problem) if part)
    return f"{line}: {problem}"


def _refuse_depth(path: Path, text: str) -> None:
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEEPEST:
            raise InvalidSweep(f"{path}: more than {_DEEPEST} brackets are open at a time; it is nested too deeply")
    if _INDENTED.search(text):
        raise InvalidSweep(f"{path}: a line begins with 400 blanks or dashes; it is nested too deeply")


def _refuse_explosion(path: Path, text: str) -> None:
    """Count the values of a file with its aliases expanded, without expanding them; refuse too many."""
    if "*" not in text or "&" not in text:
        return
    import yaml

    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node | None) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        known = sizes.get(id(node), 0)
        if known is None:
            raise InvalidSweep(f"{path}, line {node.start_mark.line + 1}: an alias refers to a value that contains it")
        if not known:
            sizes[id(node)] = None  # count in progress
            parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
            known = 1 + sum(size(part) for part in parts)
            sizes[id(node)] = known
        return known

    for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
        if (total := size(document)) > MOST_VALUES:
            raise InvalidSweep(
                f"{path}: with its aliases (*NAME) expanded it holds {_short(total)} values; at most {MOST_VALUES:,}"
            )


def _short(count: int) -> str:
    return f"{count:,}" if count < 10**9 else f"about {float(min(count, 10**300)):.0e}"
