"""Slurm options that are refused, each with one line."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launchers.slurm.options import _NAMES, _OURS, _alternative, options_from_dict
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
        {"sbatch": {"dependency": "afterok:12,singleton"}},
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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"sbatch": {"mem-per-cpu": "4G"}},
            "sbatch.mem-per-cpu=4G and launcher.mem=0 exclude each other in Slurm",
        ),
        ({"sbatch": {"mem_per_gpu": "4G"}, "mem": "8G"}, "add launcher.mem=null"),
        ({"sbatch": {"cpus-per-gpu": 8}, "cpus_per_task": 64}, "add launcher.cpus_per_task=null"),
        ({"sbatch": {"oversubscribe": True}}, "launcher.exclusive=true exclude each other in Slurm"),
        ({"sbatch": {"gpus": 8}}, "cluster.devices_per_node=N, and launcher.gpus is gpus_per_node, gres or none"),
        ({"sbatch": {"gpus-per-node": 8}}, "cluster.devices_per_node=N"),
        ({"sbatch": {"gres": "gpu:8"}}, "launcher.gpus=gres"),
        (
            {"gpus": 8},
            "must be gpus_per_node, gres or none (how GPUs are requested), not a number; the",
        ),
        ({"sbatch": {"nodes": 2}}, "follow from each point's world size"),
        ({"sbatch": {"time": 60}}, "use launcher.time_min"),
        ({"sbatch": {"time-min": 60}}, "pilots count on their whole time limit"),
        ({"sbatch": {"account": "x"}}, "use launcher.account"),
    ],
)
def test_a_refusal_names_what_takes_the_value(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UltrasweepError) as error:
        options_from_dict(options)
    assert told in str(error.value)


def test_every_parameter_of_the_launcher_has_a_remedy_that_exists() -> None:
    for parameter in sorted(_OURS):
        remedy = _alternative(parameter)
        named = set(re.findall(r"launcher\.([a-z_]+)", remedy)) - {"dry"}  # read before the options are made
        assert remedy and named <= _NAMES, parameter


def test_what_excludes_an_option_is_taken_without_it() -> None:
    chosen = options_from_dict({"sbatch": {"mem-per-cpu": "4G", "oversubscribe": False}, "mem": None})
    assert chosen.sbatch == {"mem-per-cpu": "4G", "oversubscribe": False}


def test_a_dependency_that_orders_nothing_is_refused_by_the_name_of_what_does() -> None:
    with pytest.raises(UltrasweepError, match=r"singleton holds back no pilot: .*; launcher\.max_pilots=1 runs one"):
        options_from_dict({"sbatch": {"dependency": "singleton"}})
    with pytest.raises(UltrasweepError, match=r"sbatch\.array is set by the launcher itself; use launcher\.max_pilots"):
        options_from_dict({"sbatch": {"array": "0-3%1"}})
    assert options_from_dict({"sbatch": {"dependency": "afterok:12"}}).sbatch


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


def test_a_secret_is_refused_with_what_works_instead() -> None:
    with pytest.raises(UltrasweepError, match=r"'export HF_TOKEN=\*\*\*' holds a secret, .*'source ~/.secrets'"):
        options_from_dict({"setup": ["export HF_TOKEN=hunter2"]})
    with pytest.raises(UltrasweepError, match=r"enroot: ~/\.config/enroot/\.credentials"):
        options_from_dict({"srun_args": ["--container-image=docker://me:hunter2@registry.example/torch"]})
    assert options_from_dict({"setup": ["source ~/.secrets", "export HF_TOKEN=$(cat ~/.token)"]}).setup
