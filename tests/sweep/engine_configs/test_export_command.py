"""``python -m sweep export`` as a command: its help, what it prints, and the files that it writes."""

from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path
from typing import BinaryIO

import pytest

from sweep.__main__ import main
from sweep.cli.point_commands import ENGINES as OFFERED
from sweep.cli.point_commands import EXPORT
from sweep.engine_configs import export
from sweep.engine_configs.export import ENGINES, engine_config, write_config
from tests.sweep.engine_configs.layouts import LAYOUTS
from tests.sweep.helpers import store_attempt

ROOT = Path(__file__).resolve().parents[3]


def test_the_help_names_engines_and_versions() -> None:
    assert tuple(ENGINES) == OFFERED
    told = EXPORT.parser().format_help().replace("\n", " ")
    for target, _ in ENGINES.values():
        assert target.version.split(",")[0].removesuffix(" main") in told


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = LAYOUTS["8B zero2"]
    store_attempt(tmp_path / "own", experiment)
    arguments = ["export", experiment.hash, "--results", str(tmp_path)]
    assert main([*arguments, "--to", "torchtitan"]) == 0
    told = capsys.readouterr()
    assert "global_batch_size=32," in told.out
    assert "for torchtitan 0.3.0" in told.out and "--module ultrasweep_torchtitan --config layout" in told.err
    assert main([*arguments, "--to", "torchtitan-0.2"]) == 0
    told = capsys.readouterr()
    assert tomllib.loads(told.out)["training"]["global_batch_size"] == 32
    assert "for torchtitan 0.2.2" in told.out and "for torchtitan 0.2.2" in told.err
    assert "warning: zero_stage" in told.out and "warning: zero_stage" in told.err
    folder = tmp_path / "out"
    assert main([*arguments, "--to", "megatron", "--out", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(f"2 files in {folder}: megatron_flags.txt, NOTES.txt\n")
    assert (folder / "NOTES.txt").read_text().startswith(f"{experiment.id} for Megatron-Core 0.19.2\n")
    assert main([*arguments, "--to", "megatron", "--out", str(folder)]) == 2
    assert "megatron_flags.txt already exists" in capsys.readouterr().err
    assert main([*arguments, "--to", "nanotron"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert "nanotron main, commit 2411b022: zero_stage=2 (it shards only the optimizer" in told.err


@pytest.mark.slow
def test_rows_keep_the_id_that_they_were_stored_with(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = str(ROOT / "results" / "recorded")
    assert main(["export", "295a90f3", "--to", "torchtitan-0.2", "--results", recorded]) == 0
    assert 'description = "llama8b-dp4z2-mbs2-gbs32-s4096-295a90f3"' in capsys.readouterr().out


def test_a_full_disk_leaves_no_file_that_the_next_command_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(next(iter(LAYOUTS.values())), "torchtitan")
    create = export.create

    def full(path: Path) -> BinaryIO:
        if path.name == "NOTES.txt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(path)

    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space left"):
        disk.setattr(export, "create", full)
        write_config(config, tmp_path)
    assert len(write_config(config, tmp_path)) > 1
