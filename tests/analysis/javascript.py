"""The page's scripts without their page: an expression's value, computed by the browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.explorer.closed_forms import script
from tests.analysis.browser import Browser

FOLDER = Path(__file__).resolve().parents[2] / "analysis" / "templates" / "explorer"


def evaluate(browser: Browser, scripts: Sequence[str], expression: str, given: Any) -> Any:
    """The value of ``expression``, which may name the globals of ``scripts``, the closed forms, and ``input``, which is
    ``given``.

    It travels as text: the driver's own way back would turn large whole numbers into floats.
    """
    source = "\n".join(
        [(FOLDER / "python.js").read_text(), script(), *((FOLDER / name).read_text() for name in scripts)]
    )
    body = f"{source}\nconst input = JSON.parse(arguments[0]);\nreturn JSON.stringify({expression});"
    return json.loads(browser.driver.execute_script(body, json.dumps(given)))
