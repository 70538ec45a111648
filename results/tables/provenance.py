"""Identifies the running code: commit, versions, command line. Unknown values are None."""

from __future__ import annotations

import contextlib
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from results.text.secrets import hide_in_arguments

_GIT_LIMIT_S = 10.0
_PACKAGE = "ultrasweep"


def code_provenance(root: Path) -> dict[str, Any]:
    """``git_commit``, ``git_dirty`` (untracked files count, because they can be imported) and ``ultrasweep_version``.

    The first two are None unless ``root`` is itself the top of a checkout: the commit of a checkout that only contains
    an installed copy does not identify this code.
    """
    commit = dirty = None
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is not None and Path(top.strip()).resolve() == root.resolve():
        head = _git(root, "rev-parse", "HEAD")
        status = _git(root, "status", "--porcelain")
        commit = head.strip() if head is not None else None
        dirty = bool(status.strip()) if status is not None else None
    return {"git_commit": commit, "git_dirty": dirty, "ultrasweep_version": _version(root)}


def python_version() -> str:
    return platform.python_version()


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command of this process, quoted for a shell, without secret values. ``argv``: replaces the interpreter's
    arguments."""
    return shlex.join(hide_in_arguments(argv if argv is not None else sys.orig_argv))


def _version(root: Path) -> str | None:
    """Version of the code under ``root``. A checkout has it in its pyproject.toml, because it may run without being
    installed, or while another version is installed."""
    with contextlib.suppress(OSError, ValueError):
        project = tomllib.loads((root / "pyproject.toml").read_text()).get("project", {})
        if project.get("name") == _PACKAGE and "version" in project:
            return str(project["version"])
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
