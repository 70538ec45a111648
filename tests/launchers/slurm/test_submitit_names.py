"""Options by submitit's names: every parameter of the installed submitit is taken, or answered in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import submitit

from launchers.slurm.batch_file import submission_text
from launchers.slurm.options import SlurmOptions, options_from_dict
from launchers.slurm.submitit_names import _Parameters, in_our_options
from tests.launchers.slurm.test_batch_file import job, parameters
from workloads.spec.errors import InvalidSweep
from workloads.spec.other_names import OF_SUBMITIT

DEFAULTS = {"partition": None, "time_min": 120, "mem": "0", "sbatch": {}, "setup": []}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"slurm_partition": "gpu", "slurm_qos": None}, {"partition": "gpu"}),
        ({"timeout_min": 60}, {"time_min": 60}),
        ({"slurm_time": 60, "time_min": 120}, {"time_min": 60}),
        ({"mem_gb": 4, "mem": "0"}, {"mem": "4G"}),
        ({"mem_gb": 0.5}, {"mem": "512M"}),
        ({"slurm_mem": "4GB"}, {"mem": "4G"}),
        ({"slurm_array_parallelism": 3}, {"max_pilots": 3}),
        ({"slurm_setup": ["module load x"], "setup": []}, {"setup": ["module load x"]}),
        ({"slurm_mail_type": "END", "slurm_wckey": "k"}, {"sbatch": {"mail_type": "END", "wckey": "k"}}),
        (
            {"slurm_additional_parameters": {"switches": 1}, "sbatch": {"contiguous": True}},
            {"sbatch": {"contiguous": True, "switches": 1}},
        ),
    ],
)
def test_submitits_names_are_taken(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert in_our_options(given, DEFAULTS) == ours


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"slurm_gres": "gpu:8"},
            "launcher.slurm_gres=gpu:8: the number of GPUs of a node is cluster",
        ),
        ({"slurm_use_srun": False}, "launcher.slurm_use_srun=false: a node has one task"),
        ({"slurm_max_num_timeout": 3}, "a pilot is requeued whenever its job ends while points are left; leave it out"),
        ({"slurm_switches": 1}, "launcher.slurm_switches=1: write launcher.sbatch.switches=1"),
        ({"slurm_particion": "x"}, "has no parameter 'particion'; did you mean 'partition'?"),
        ({"partition": "a", "slurm_partition": "b"}, "launcher.partition=a and launcher.slurm_partition=b differ"),
        ({"sbatch": {"wckey": "a"}, "slurm_wckey": "b"}, "and launcher.slurm_wckey=b differ; give one of them"),
    ],
)
def test_what_a_sweep_cannot_have_is_answered(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSweep) as error:
        in_our_options(given, DEFAULTS)
    assert told in str(error.value) and "\n" not in str(error.value)


REFUSED = (
    *("comment", "gpus_per_node", "gpus_per_task", "gres", "job_name", "nodes", "ntasks_per_node", "num_gpus"),
    *("stderr_to_stdout", "teardown", "use_srun"),
)
VALUES = {
    "setup": ["true"],
    "srun_args": ["-v"],
    "additional_parameters": {"x": 1},
    "mem": "4GB",
    "exclusive": True,
    "time": 60,
    "cpus_per_task": 3,
    "array_parallelism": 3,
    "signal_delay_s": 90,
}


def test_every_parameter_of_submitit_is_taken_or_answered() -> None:
    with pytest.raises(ValueError, match="Valid parameters are") as error:
        _Parameters(folder=".").update_parameters(no_such=1)
    names = re.findall(r"^  - (\w+) ", str(error.value), re.MULTILINE)
    assert len(names) > 25 and {"partition", "additional_parameters"} <= set(names)
    for name in names:
        try:
            options = options_from_dict(in_our_options({f"slurm_{name}": VALUES.get(name, "x"), "mem": None}, DEFAULTS))
        except InvalidSweep as refusal:
            assert name in REFUSED and re.fullmatch(rf"launcher\.slurm_{name}=x: [^\n]+", str(refusal)), name
        else:
            assert options != SlurmOptions(mem=None) or name == "exclusive", name


def test_a_parameter_without_an_option_of_ours_reaches_the_batch_file() -> None:
    options = options_from_dict(in_our_options({"slurm_dependency": "after:1", "slurm_mail_user": "a@b.c"}, DEFAULTS))
    written = parameters(submission_text(job(), options))
    assert (written["dependency"], written["mail-user"]) == ("after:1", "a@b.c")


PAGE = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text()
TABLE = {
    name: here
    for first, here in re.findall(r"^\| (`\w+`[^|]*) \|[^|]*\|[^|]*\| ([^|]+) \|$", PAGE, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", first)
}
"""What stands in the table of options for each name of submitit."""


def test_the_table_of_options_is_complete() -> None:
    assert {f"slurm_{name}" for name in submitit.SlurmExecutor._valid_parameters()} <= set(TABLE)
    assert set(submitit.AutoExecutor._typed_parameters()) <= set(TABLE)


def test_the_table_of_options_says_what_is_taken() -> None:
    taken = {name: here for name, here in TABLE.items() if here.startswith("`launcher.") and is_submitits(name)}
    assert len(taken) > 15 and {"timeout_min", "slurm_partition", "slurm_array_parallelism"} < set(taken)
    for name, here in taken.items():
        value = {"slurm_setup": ["module load x"], "slurm_additional_parameters": {"wckey": "k"}}.get(name, 7)
        assert [f"`launcher.{ours}`" for ours in in_our_options({name: value}, {})] == [here.partition(",")[0]], name


def test_the_table_of_options_says_what_is_refused() -> None:
    refused = [name for name, here in TABLE.items() if here.startswith("none: ") and is_submitits(name)]
    assert {f"slurm_{name}" for name in REFUSED} <= set(refused)
    for name in refused:
        with pytest.raises(InvalidSweep, match=rf"^launcher\.{name}=7: "):
            in_our_options({name: 7}, {})


def is_submitits(name: str) -> bool:
    """Whether an option of this name is understood as one of submitit's."""
    return name.startswith(OF_SUBMITIT)
