"""Python and its translation to JavaScript: the same values, and one line for what has no translation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.explorer import closed_forms
from analysis.to_javascript.bundle import translated
from analysis.to_javascript.layout import WIDTH
from analysis.to_javascript.modules import NotPortable
from tests.analysis import portable
from tests.analysis.browser import Browser
from tests.analysis.javascript import FOLDER

CASES: dict[str, list[list[Any]]] = {
    "division": [[a, b] for a in (0, 7, -7, 2**53 - 1) for b in (1, 3, 128)],
    "rounding": [[]],
    "truths": [[[], "", {}], [[0], "a", {"b": 1}], [[1, 2], "", {}]],
    "lists": [[[1, 2, 3]], [[4]]],
    "records": [[]],
    "tables": [[]],
    "order": [[[3, 1, 2]], [[4, 4, 0, 7]]],
    "library": [[[1, 3, 3, 8]]],
    "loops": [[5], [8]],
    "calls": [[1], [4]],
    "texts": [["a12kb7"], [""]],
    "summed": [[[3, 4]]],
}


def test_both_languages_give_the_same_values(browser: Browser) -> None:
    source = (FOLDER / "python.js").read_text() + translated("Made", [(portable.__name__, name) for name in CASES])
    # A dict of the test travels as pairs.
    code = """return JSON.stringify(JSON.parse(arguments[0]).map(([name, given]) => Made[name](...given.map((one) =>
      one !== null && one.constructor === Object ? py.dict(Object.entries(one)) : one)),
      (_, value) => (value instanceof py.Tuple ? [...value] : value)));"""
    given = [(name, arguments) for name, cases in CASES.items() for arguments in cases]
    said = json.loads(browser.driver.execute_script(f"{source}\n{code}", json.dumps(given)))
    for (name, arguments), found in zip(given, said, strict=True):
        expected = getattr(portable, name)(*json.loads(json.dumps(arguments)))
        assert found == json.loads(json.dumps(expected)), (name, arguments)


def test_a_sum_of_records_brings_their_addition_along() -> None:
    assert " __add__(other) {" in translated("Made", [(portable.__name__, "summed")])


def test_plain_data_becomes_records_of_their_classes(browser: Browser) -> None:
    tags = (portable.__name__, "KINDS")
    source = (FOLDER / "python.js").read_text() + translated(
        "Made", [(portable.__name__, "Page")], ["areas"], tags=tags
    )
    plain = {"shapes": [{"kind": "square", "side": 3}, {"kind": "strip", "side": 2}], "unknown": 1}
    code = "return JSON.stringify(py.made(Made.Page, JSON.parse(arguments[0])).areas());"
    said = json.loads(browser.driver.execute_script(f"{source}\n{code}", json.dumps(plain)))
    page = portable.Page((portable.Square(3), portable.Strip(2)))
    assert said == page.areas()


OUTSIDE = {
    "with open(x) as file:\n        return file": "With",
    "return print(x)": "print",
    "return f'{x:.1f}'": "a format of a value",
    "return x[::2]": "a slice with a step",
    "import os\n    return os.getcwd()": "the name os",
    "return dict(**x)": "an argument **",
    "try:\n        return 1\n    finally:\n        pass": "Try",
}


def test_what_has_no_translation_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, (body, said) in enumerate(OUTSIDE.items()):
        name = f"outside_{number}"
        (tmp_path / f"{name}.py").write_text(f"def made(x):\n    {body}\n")
        with pytest.raises(NotPortable, match=rf"^{name}.py:\d+: .* has no translation to JavaScript$") as refused:
            translated("Made", [(name, "made")])
        assert said in str(refused.value)


def test_closed_forms_are_translated_readably() -> None:
    lines = closed_forms.script(comments=True).split("\n")
    assert max(len(line) for line in lines if not line.lstrip().startswith(("`", '"'))) <= WIDTH  # a text is one line
    assert "  /** costs.shape.params.num_params: Number of all parameters, tied embeddings counted once. */" in lines
    for name in (name for _, name in closed_forms.DEFINITIONS):
        assert any(f" {name}" in line for line in lines), name
