"""Reads one YAML file of a user: each mistake is reported on one line with its place, and expansion is limited."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from sweep.composing.ambiguous_scalars import refuse_ambiguous_scalars
from workloads.spec.errors import InvalidSweep

MOST_VALUES = 100_000
"""A file whose aliases (``*name``) stand for more values than this is refused."""
_DEEPEST = 100
"""Deepest nesting of brackets; PyYAML's time grows with its square."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in ``path``, as OmegaConf reads YAML. An empty file is an empty mapping.

    Raises `InvalidSweep` with the file, and the line if known, for text that is not UTF-8 or not YAML, for anything but
    a mapping, for aliases that expand to more than `MOST_VALUES` values, and for every value that YAML 1.1 reads as
    another number or word (``0042``, ``16:00``, ``no``).
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        text = path.read_text(encoding="utf-8")
        _refuse_depth(path, text)
        _refuse_explosion(path, text)
        refuse_ambiguous_scalars(str(path), text)
        data = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except InvalidSweep:
        raise
    except UnicodeDecodeError as error:
        raise InvalidSweep(f"{path} is not UTF-8 text (byte {error.start + 1} of it); save it as UTF-8") from None
    except MarkedYAMLError as error:
        raise InvalidSweep(f"{path}{_place(error)}") from None
    except RecursionError:  # nested by indentation
        raise InvalidSweep(f"{path}: it is nested too deeply") from None
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise InvalidSweep(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise InvalidSweep(f"{path} does not hold a mapping")
    return {str(key): value for key, value in data.items()}


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

    total = size(yaml.compose(text, Loader=yaml.SafeLoader))
    if total > MOST_VALUES:
        raise InvalidSweep(
            f"{path}: with its aliases (*NAME) expanded it holds {_short(total)} values; at most {MOST_VALUES:,}"
        )


def _short(count: int) -> str:
    return f"{count:,}" if count < 10**9 else f"about {float(min(count, 10**300)):.0e}"
