"""The pages of ``docs/reference/`` say what the code says today."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from docs.tools import write_reference
from docs.tools.conf_comments import read_options
from launchers.settings import LaunchSettings
from launchers.slurm.options import SlurmOptions
from sweep.composing.conffiles import PACKAGED

CONF = sorted([PACKAGED / "config.yaml", *PACKAGED.glob("launcher/*.yaml"), *PACKAGED.glob("measure/*.yaml")])


@pytest.mark.slow
@pytest.mark.parametrize("name", write_reference.PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    written = (write_reference.FOLDER / name).read_text(encoding="utf-8")
    made = write_reference.PAGES[name]()
    # Spaces do not count: versions of argparse break lines in different places.
    up_to_date = "".join(written.split()) == "".join(made.split())
    assert up_to_date, f"docs/reference/{name} is out of date: run {write_reference.COMMAND}"


@pytest.mark.parametrize("path", CONF, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_option_says_what_it_means(path: Path) -> None:
    options = read_options(path).by_name()
    assert options
    assert [name for name, option in options.items() if not option.meaning and name != "launcher"] == []


def test_options_of_several_launchers_mean_the_same() -> None:
    files = [read_options(path).by_name() for path in PACKAGED.glob("launcher/*.yaml")]
    for name in ("max_attempts", "phase_limits_s", "environment", "breaker_failures"):
        assert len({options[name].meaning for options in files}) == 1, name


def test_the_launchers_files_have_every_option_of_the_code() -> None:
    slurm = set(read_options(PACKAGED / "launcher" / "slurm.yaml").by_name())
    assert {field.name for field in dataclasses.fields(SlurmOptions)} <= slurm
    pilot = {field.name for field in dataclasses.fields(LaunchSettings)}
    decided_elsewhere = {"launcher", "device", "cluster", "measure", "method", "num_devices", "probe", "linger_s"}
    assert pilot - decided_elsewhere <= slurm
    assert pilot - decided_elsewhere <= set(read_options(PACKAGED / "launcher" / "local.yaml").by_name())


def test_comments_of_a_file_become_meanings(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(
        '# What it is\n# about.\ndefaults:\n  - other: one\n\nname: null # its name\n\n# Where.\nplace: "a&b"\n'
        "deep:\n  # Two lines\n  # above\n  er: 3 # and one behind\n  est: {}\nlast: 1 # end\n"
    )
    found = read_options(path)
    assert found.intro == "What it is about."
    assert [section.heading for section in found.sections] == ["", "Where."]
    assert {name: (option.default, option.meaning) for name, option in found.by_name().items()} == {
        "name": ("null", "its name"),
        "place": ('"a&b"', ""),
        "deep.er": ("3", "Two lines above and one behind"),
        "deep.est": ("{}", ""),
        "last": ("1", "end"),
    }
