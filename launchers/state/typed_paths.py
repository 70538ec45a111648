"""Absolute paths as the user typed them: links are kept, because another machine may reach their targets otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def absolute_path(path: Path) -> Path:
    """``path`` below the shell's working folder. The kernel's name of that folder has no links."""
    if path.is_absolute():
        return path
    typed, real = Path(os.environ.get("PWD", "")), Path.cwd()
    try:
        return (typed if typed.is_absolute() and typed.samefile(real) else real) / path
    except OSError:
        return real / path
