"""What pages show below their commands is what these print today, and a stale line is found and written anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools.write_examples.lines import compared, renewed
from docs.tools.write_examples.printed import look_through
from docs.tools.write_examples.shown import PROGRAM, Example, examples, saved_files
from tests.docs.pages import WRITTEN_BY_HAND, name_of

PAGES = [
    pytest.param(path, marks=pytest.mark.exhaustive(seconds=30 if path.stem == "advise" else 4), id=name_of(path))
    for path in WRITTEN_BY_HAND
    if any(example.command.startswith(PROGRAM) for example in examples(path.read_text()))
]
PRINTED = [
    "512 GPUs: 1,300 layouts timed",
    "",
    "model    GPUs  tokens/s/GPU  layout                    id",
    "llama8b     8        11,594  dp 4, tp 2, mbs 4 x 4     02305eac  +2 variants",
    "            8           452  dp 4, tp 2, mbs 2 x 8     786b6c97",
    "            8           138  dp 8, mbs 2 x 8           28cdcbb3",
    "predicted for fp8 on h100: 3.5e-05 s",
]


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_what_their_commands_print(page: Path) -> None:
    faults = [f"{name_of(page)}:{one.line}: {one.says}" for one in look_through(page) if one.is_fault]
    assert faults == [], "python -m docs.tools.write_examples --write"


def says(*shown: str) -> list[tuple[int, str | None]]:
    return [(one.line, one.new) for one in compared(Example(line=10, command="", shown=shown), PRINTED)]


def test_shown_lines_that_are_printed_differ_in_nothing() -> None:
    assert says(*PRINTED) == []
    assert says(PRINTED[3].removesuffix("  +2 variants"), "...", PRINTED[6]) == []
    assert says("512 GPUs: ...", "... GPUs  tokens/s/GPU  ... id", "…") == []


def test_a_stale_number_id_or_width_is_found() -> None:
    assert says("512 GPUs: 1,290 layouts timed") == [(10, PRINTED[0])]
    assert says(PRINTED[2], "            8           139  dp 8, mbs 2 x 8           12cdcbbf") == [(11, PRINTED[5])]
    assert says("model GPUs  tokens/s/GPU  layout  id") == [(10, PRINTED[2])]
    assert says("512 GPUs: ... layouts timed", "predicted for fp8 ... 3.6e-05 s") == [
        (11, "predicted for fp8 ... 3.5e-05 s")
    ]
    stale = "llama8b 8 11,590 dp 4, tp 2, mbs 4 x 4 02305eac"
    assert says(stale) == [(10, PRINTED[3].removesuffix("  +2 variants"))]


def test_of_lines_with_the_same_words_the_one_with_most_equal_numbers_is_meant() -> None:
    shown = ("            8           450  dp 4, tp 2, mbs 2 x 8     786b6c97",)
    other = [PRINTED[4].replace("2 x 8     786b6c97", "1 x 9     11111111"), *PRINTED, PRINTED[4].replace("8 ", "9 ")]
    (found,) = compared(Example(line=1, command="", shown=shown), other)
    assert found.new == PRINTED[4]


def test_a_line_with_other_words_or_in_another_order_is_left_to_a_person() -> None:
    assert says("predicted for fp9 on h100: 3.5e-05 s") == [(10, None)]
    assert says("            8           452  dp 4, tp 2, mbs 2 x 8, ZeRO 1     786b6c97") == [(10, None)]
    assert says("            8           452  dp 4, tp 2, mbs 2 x 8") == []
    found = says(PRINTED[5], PRINTED[4])
    assert [new for _, new in found] == [None]


PAGE = """# A page

Two commands:

    python -m sweep advise model=llama8b   # one
    python -m sweep plan +grid=tiny

`plan` prints:

```
verdict
```

Save as `runs.csv`:

```
gpu
```

1. Indented:

       make lint

   It prints:

   ```
   All
   ```

One paragraph. `python -m sweep --help` is no command block.

    python -m sweep status results

One.

Two.

```
far away
```
"""


def test_outputs_belong_to_the_command_before_them() -> None:
    assert list(examples(PAGE)) == [
        Example(line=11, command="python -m sweep plan +grid=tiny", shown=["verdict"]),
        Example(line=27, command="make lint", shown=["All"], indent="   "),
        Example(line=39, command="", shown=["far away"]),
    ]
    assert saved_files(PAGE) == {"runs.csv": "gpu\n"}


def test_a_stale_page_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Help:\n\n    python -m sweep --help\n\n```\nusage:   python -m sweep COMMAND [OVERRIDE ...] [options]\n```\n\n"
        "    python -m sweep plan +grid=tiny --conf absent/conf\n\n```\nverdict\n```\n"
    )
    wrong, left_out = look_through(page)
    assert (wrong.line, wrong.new) == (6, "usage: python -m sweep COMMAND [OVERRIDE ...] [options]")
    assert "absent/conf, which does not exist" in left_out.says and not left_out.is_fault
    page.write_text(renewed(page.read_text(), [wrong, left_out]))
    assert look_through(page) == [left_out]
