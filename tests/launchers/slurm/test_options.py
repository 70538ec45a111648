"""Slurm options that are refused, each with one line."""

from __future__ import annotations

from typing import Any

import pytest

from launchers.slurm.options import options_from_dict
from results.errors import UltrasweepError


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
        {"setup": ["export HF_TOKEN=hunter2"]},
        {"setup": ["module load cuda", "export https_proxy=http://me:hunter2@proxy:8080"]},
        {"srun_args": ["--container-image=docker://me:hunter2@registry.example/torch"]},
        {"prefix": ["apptainer", "exec", "--docker-password", "hunter2"]},
        {"sbatch": {"export": "ALL,GITHUB_PAT=hunter2"}},
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(UltrasweepError) as error:
        options_from_dict(options)
    assert str(error.value).startswith("launcher: ") and "\n" not in str(error.value)
    assert "hunter2" not in str(error.value)


def test_a_secret_is_refused_with_what_works_instead() -> None:
    with pytest.raises(UltrasweepError, match=r"'export HF_TOKEN=\*\*\*' holds a secret, .*'source ~/.secrets'"):
        options_from_dict({"setup": ["export HF_TOKEN=hunter2"]})
    with pytest.raises(UltrasweepError, match=r"enroot: ~/\.config/enroot/\.credentials"):
        options_from_dict({"srun_args": ["--container-image=docker://me:hunter2@registry.example/torch"]})
    assert options_from_dict({"setup": ["source ~/.secrets", "export HF_TOKEN=$(cat ~/.token)"]}).setup
