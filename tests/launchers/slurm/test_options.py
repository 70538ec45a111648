"""Slurm options that are refused, each with one line."""

from __future__ import annotations

from typing import Any

import pytest

from launchers.slurm.options import options_from_dict
from results.errors import UltrasweepError
from workloads.spec.errors import InvalidSweep


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "a b"},
        {"partition": "a\n#SBATCH --uid=0"},
        {"partition": "$(id)"},
        {"partition": "--uid=0"},
        {"account": "a;b"},
        {"qos": "`id`"},
        {"constraint": "a b"},
        {"constraint": "a\nb"},
        {"reservation": "r'"},
        {"exclude": "node1 node2"},
        {"nodelist": "node1\nrm"},
        {"gpu_type": "h100:8"},
        {"gpus": "none", "gpu_type": "h100"},
        {"mem": "all"},
        {"mem": "-1"},
        {"nice": "5"},
        {"nice": 1.5},
        {"time_min": 0},
        {"time_min": "60"},
        {"time_min": True},
        {"time_min": 3, "signal_delay_s": 120},
        {"signal_delay_s": -1},
        {"gpus": "some"},
        {"requeue": "yes"},
        {"exclusive": False},
        {"max_nodes": 0},
        {"target_h": 0},
        {"target_h": "1"},
        {"setup": ["a\nb"]},
        {"setup": ["a\rb"]},
        {"setup": "module load x"},
        {"setup": [5]},
        {"setup": ["  #SBATCH --uid=0"]},
        {"srun_args": ["--a\n--b"]},
        {"prefix": ["a\0b"]},
        {"python": "py\nthon"},
        {"sbatch": {"uid\n": 1}},
        {"sbatch": {"mail user": "x"}},
        {"sbatch": {"mail-user": "x\n#SBATCH --uid=0"}},
        {"sbatch": {"output": "/etc/passwd"}},
        {"sbatch": {"partition": "x"}},
        {"sbatch": {"comment": "x"}},
        {"sbatch": {"mail-user": ["x"]}},
        {"sbatch": ["x"]},
        {"no_such": 1},
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(UltrasweepError) as error:
        options_from_dict(options)
    assert str(error.value).startswith("launcher: ") and "\n" not in str(error.value)


def test_all_mistakes_of_a_launcher_file_are_reported_at_once() -> None:
    with pytest.raises(InvalidSweep) as error:
        options_from_dict({"partition": "a b", "account": 1.5, "time_min": 0, "setup": ["a\nb"]})
    assert [message.partition("=")[0] for message in error.value.messages] == [
        "launcher: partition",
        "launcher: account",
        "launcher: time_min",
        "launcher: setup",
    ]
    assert "must be an account's name; put it in quotes" in error.value.messages[1]
