"""Values that YAML 1.1 reads as another number or word than a person sees are refused, with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.composing.config import compose_sweep
from sweep.composing.yaml_files import read_yaml
from workloads.spec.errors import InvalidSweep
from workloads.spec.hardware.cluster_fields import environment_from_dict


def test_every_value_that_yaml_reads_differently_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "account: 0042\nsbatch: {begin: 16:00, licenses: 010}\nenvironment: {MY_ID: 0x1F, NO: 'text'}\n"
        "seq_len: [0200, 4_096]\nreservation: on\nrate: 1_0e3\nhalf: 1:30.5\nexclude: 0b11\n"
    )
    with pytest.raises(InvalidSweep) as error:
        read_yaml(path)
    said = [message.removeprefix(f"{path}, line ") for message in error.value.messages]
    assert said == [
        "1: 0042 would be read as 34; write 42, or '0042' in quotes for text",
        "2: 16:00 would be read as 960; write 960, or '16:00' in quotes for text",
        "2: 010 would be read as 8; write 10, or '010' in quotes for text",
        "3: 0x1F would be read as 31; write 31, or '0x1F' in quotes for text",
        "3: NO would be read as false; write false, or 'NO' in quotes for text",
        "4: 0200 would be read as 128; write 200, or '0200' in quotes for text",
        "4: 4_096 would be read as 4096; write 4096, or '4_096' in quotes for text",
        "5: on would be read as true; write true, or 'on' in quotes for text",
        "6: 1_0e3 would be read as 10000.0; write 10000.0, or '1_0e3' in quotes for text",
        "7: 1:30.5 would be read as 90.5; write 90.5, or '1:30.5' in quotes for text",
        "8: 0b11 would be read as 3; write 3, or '0b11' in quotes for text",
    ]


def test_clear_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "whole: [0, -3, +5, 4096]\nfloats: [1.5, .5, 1e3, 2.0e-5, -1., .inf]\nwords: [true, False, null, y, none]\n"
        "texts: ['0042', \"16:00\", 2026-11-27, 02:00:00, 08, 1.10.2, 12 GB/s, 1-00:00:00]\n"
    )
    data = read_yaml(path)
    assert data["whole"] == [0, -3, 5, 4096]
    assert data["floats"] == [1.5, 0.5, 1000.0, 2e-5, -1.0, float("inf")]
    assert data["words"] == [True, False, None, "y", "none"]
    assert data["texts"][:5] == ["0042", "16:00", "2026-11-27", "02:00:00", "08"]


@pytest.mark.slow
def test_overrides_keep_what_was_written() -> None:
    slurm = ["+grid=tiny", "launcher=slurm"]
    words = ["launcher.account=0042", "+launcher.sbatch.begin=16:00", "+launcher.sbatch.licenses=010"]
    launcher = compose_sweep([*slurm, *words, "+launcher.environment.MY_ID=010"]).launcher
    assert (launcher["account"], launcher["sbatch"]) == ("0042", {"begin": "16:00", "licenses": "010"})
    assert launcher["environment"] == {"MY_ID": "010"}
    assert compose_sweep([*slurm, "launcher.account='1_000'"]).launcher["account"] == "1_000"
    for word in ("launcher.account=1_000", "grid.axes.seq_len=[128,4_096]"):
        with pytest.raises(InvalidSweep, match=r"would be read as (1000|4096); write (1000|4096), or .* for text"):
            compose_sweep([*slurm, word])
    with pytest.raises(InvalidSweep, match=r"name=1\.1 must be one word; put a number in quotes"):
        compose_sweep(["+grid=tiny", "name=1.10"])


def test_a_float_is_no_value_of_an_environment_because_its_spelling_is_lost() -> None:
    assert environment_from_dict({"A": 1, "B": "1.10"}) == {"A": "1", "B": "1.10"}
    with pytest.raises(InvalidSweep, match=r"environment: A=1\.1 must be text or a whole number; put it in quotes"):
        environment_from_dict({"A": 1.10})
