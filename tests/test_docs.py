"""The documents tell the truth: the diagrams, the links, the commands, the fields and their defaults, names in code."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from docs.tools import write_tree
from sweep.composing.conffiles import ConfFolders
from tests.docs.pages import DOCS, PAGES, REFERENCE, ROOT, WRITTEN_BY_HAND, code_lines, commands, name_of
from workloads.spec.cluster import ClusterSpec, DeviceSpec, HostSpec, LinkSpec
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.layer_list import MTP_LOSS_WEIGHT
from workloads.spec.model_fields import OF_LAYERS
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec

LONGEST = 250
"""Most lines of a page of the reference."""


# Diagrams, links and commands


def test_the_diagrams_are_what_the_script_draws(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw_architecture", DOCS / "figures" / "draw_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.FOLDER = tmp_path
    script.main()
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 2
    for path in drawn:
        assert svg_texts(path) == svg_texts(DOCS / "figures" / path.name)


def svg_texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter() if element.tag.endswith("}text")]


def test_links_lead_somewhere() -> None:
    assert [f"{target} in {name_of(path)}" for path in PAGES for target in _dead_links(path)] == []


def _dead_links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        aim = path.parent / file if file else path
        if "://" not in target and not (aim.exists() and (not anchor or anchor in anchors(aim.read_text()))):
            yield target


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_commands_exist() -> None:
    assert [f"{command} in {name_of(path)}" for path in WRITTEN_BY_HAND for command in _unknown_commands(path)] == []


def _unknown_commands(path: Path) -> Iterator[str]:
    from sweep.cli.commands import COMMANDS

    page = path.read_text()
    for name in {words[0] for words in commands(page, "sweep")} - {*COMMANDS, "--help"}:
        yield f"python -m sweep {name}"
    for module in re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)*)", page):
        if importlib.util.find_spec(module) is None:
            yield f"python -m {module}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [line.split()[1] for line in code_lines(page) if line.startswith("make ")]
    for target in {*re.findall(r"`make ([\w-]+)`", page), *asked} - {*targets}:
        yield f"make {target}"


# The reference: grids, fields, files and plans


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_pages_of_the_reference_are_short_and_open_with_their_question_and_a_command(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= LONGEST
    first_screen = "\n".join(text.splitlines()[:45])
    assert "This page answers" in first_screen
    assert commands(first_screen, "sweep")


def section(page: str, title: str) -> str:
    """The text of a page of the reference below a heading of the second level; without a title, all of it."""
    text = (DOCS / page).read_text()
    return re.split(rf"^## {title}$", text, flags=re.MULTILINE)[1].partition("\n## ")[0] if title else text


def table(text: str) -> dict[str, list[str]]:
    """Rows of the tables in a text by the name in their first cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row for row in rows}


@pytest.mark.parametrize(
    ("kind", "page", "title", "derived"),
    [
        (Experiment, "fields.md", "", {"gradient_accumulation_fusion": "null"}),
        (ModelSpec, "model_files.md", "Fields", {"name": "the file's name", "head_dim": "hidden_size / num_heads"}),
        (
            ClusterSpec,
            "clusters.md",
            "Fields of a cluster",
            {"intra_node": "required without `tiers`", "host": "all null"},
        ),
        (HostSpec, "clusters.md", "Fields of a cluster", {}),
        (LinkSpec, "clusters.md", "Fields of a cluster", {}),
        (DeviceSpec, "clusters.md", "Fields of a device", {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_field_is_described_with_its_default(kind: Any, page: str, title: str, derived: dict[str, str]) -> None:
    rows = table(section(page, title))
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            expected = "required"
        elif field.default in ("", (), dataclasses.MISSING):
            expected = {"": "empty"}.get(field.default, "none")
        else:
            plain = dataclasses.asdict(field.default) if dataclasses.is_dataclass(field.default) else field.default
            expected = yaml.safe_dump(plain).partition("\n")[0].strip("'")
        assert rows[field.name][2] == derived.get(field.name, expected), field.name
    if kind not in (LinkSpec, ClusterSpec, HostSpec):
        of_layers = OF_LAYERS if kind is ModelSpec else ()
        assert set(rows) == {*(field.name for field in dataclasses.fields(kind)), *of_layers}


def test_the_weight_of_multi_token_modules_is_described_with_its_default() -> None:
    assert table(section("model_files.md", "Fields"))["mtp_loss_weight"][2] == f"{MTP_LOSS_WEIGHT:g}"


@pytest.mark.parametrize("kind", [MoESpec, MLASpec])
def test_fields_of_experts_and_latent_attention_are_named(kind: Any) -> None:
    assert {field.name for field in dataclasses.fields(kind)} <= set(
        re.findall(r"`(\w+)`", section("model_files.md", ""))
    )


def test_every_choice_is_named() -> None:
    from workloads.spec.experiment_values import _CHOICES
    from workloads.spec.recomputation import OPERATIONS

    rows = table(section("fields.md", ""))
    assert set(re.findall(r"`([\w+]+)`", rows["recompute"][1])) == {"auto", "none", "selective", "full", *OPERATIONS}
    for field, choices in _CHOICES.items():
        if field == "recompute":
            continue  # they are joined
        assert tuple(re.findall(r"`([\w+]+)`", rows[field][1])) == choices


def test_names_of_expressions_and_sections_and_shipped_files_are_complete() -> None:
    from results.tables.schema import VERDICTS
    from sweep.grids.grid import _SECTIONS, CHECKED_FIELDS, SHAPE_NAMES, grid_from_dict
    from workloads.spec.errors import InvalidSweep

    named = set(re.findall(r"`([\w.]+)`", section("grids.md", "")))
    with pytest.raises(InvalidSweep) as refused:
        grid_from_dict("any", {"axes": {"model": "tiny"}, "where": {"any": "no_function(1)"}})
    functions = refused.value.messages[0].partition("if-else, ")[2].split(", ")
    assert len(functions) >= 3
    assert {*SHAPE_NAMES, *CHECKED_FIELDS, *functions, "devices_per_node"} <= named
    assert set(table(section("grids.md", "Sections of a grid file"))) >= set(_SECTIONS)
    assert {*ConfFolders().names("device")} <= set(re.findall(r"`(\w+)`", section("clusters.md", "")))
    assert list(table(section("plans.md", "Verdicts"))) == list(VERDICTS)


def test_the_page_of_results_names_every_room_and_file_of_its_code() -> None:
    folder = ROOT / "results"
    page = (folder / "README.md").read_text()
    files = [path.name for path in folder.glob("*.py") if path.stem != "__init__"]
    rooms = [f"{path.parent.name}/" for path in folder.glob("*/__init__.py")]
    assert len(files) >= 3
    assert len(rooms) >= 4
    assert [name for name in (*files, *rooms) if f"| `{name}` |" not in page] == []


# docs/guides.md: where a new field or outcome has to be named


def test_every_field_of_a_point_has_its_column_and_can_be_run_again() -> None:
    from results.tables.schema import CONFIG_COLUMNS

    fields = {field.name for field in dataclasses.fields(Experiment)}
    assert fields <= {column.name for column in CONFIG_COLUMNS}
    spelled_out = fields - {"engine", "engine_version"}
    assert set(ConfFolders().read("grid", "one_point")["axes"]) == spelled_out
    script = (ROOT / "analysis" / "templates" / "explorer" / "rerun.js").read_text()
    always = set(re.findall(r'"(\w+)"', re.findall(r"ALWAYS = \[(.*?)\]", script)[0]))
    usual = set(re.findall(r"(\w+): ", re.findall(r"DEFAULTS = \{(.*?)\}", script)[0]))
    since = set(re.findall(r"(\w+): \[", re.findall(r"SINCE = \{(.*?)\}", script)[0]))
    assert always | usual | since == spelled_out - {"model"}


def test_every_outcome_and_verdict_is_in_the_glossary() -> None:
    from results.tables.schema import OUTCOMES, VERDICTS

    rows = {row[0].strip("*"): row[1] for row in map(cells, write_tree.ROOMS.read_text().splitlines()) if len(row) == 2}
    assert tuple(re.findall(r"`(\w+)`", rows["outcome"])) == OUTCOMES
    assert set(re.findall(r"`(\w+)`", rows["verdict"])) == set(VERDICTS)


def test_files_and_names_in_code_exist() -> None:
    """What pages call by its path exists; a name beside a path ("`wants_retry` in `a/b.py`") stands in that file."""
    assert [f"{name} in {name_of(path)}" for path in PAGES for name in _missing_names(path)] == []


def _missing_names(path: Path) -> Iterator[str]:
    page = path.read_text()
    rooms = "|".join((*write_tree.PACKAGES, "tests", "docs"))
    for name in re.findall(rf"`((?:{rooms})/[\w/.]+)`", page):
        # NAME and KIND stand for anything
        if not re.search(r"\b[A-Z]{4,}\b", name) and not (ROOT / name).exists():
            yield name
    for name, file in re.findall(r"`(\w+)`\s+(?:in|of)\s+`((?:\w+/)+\w+\.\w+)`", page):
        if not (ROOT / file).exists() or not re.search(rf"\b{name}\b", (ROOT / file).read_text()):
            yield f"{name} of {file}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []


# The guide to adding an axis


@pytest.mark.parametrize(
    "field",
    [
        *("recompute_every", "cp_kind", "pp_split", "pp_stages", "pad_vocab_to", "gradient_accumulation_fusion"),
        "grad_reduce",
    ],
)
def test_the_guide_names_every_file_that_an_axis_touches(field: str) -> None:
    """Each product file in which an existing field stands is named in the guide, by itself or by its folder."""
    section = (DOCS / "guides.md").read_text().partition("## An axis")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:sweep|workloads|launchers|results|analysis)/[\w/.]+)`", section)
    kinds = (".py", ".js", ".ts", ".yaml")
    files = [
        path
        for package in write_tree.PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in kinds and not path.is_relative_to(ROOT / "results" / "recorded")
    ]
    touched = [name_of(path) for path in files if re.search(rf"\b{field}\b", path.read_text())]
    assert len(touched) > 15, "the test does not see the files"
    missing = [
        name for name in touched if not any(name == one or name.startswith(f"{one.rstrip('/')}/") for one in named)
    ]
    assert missing == []
