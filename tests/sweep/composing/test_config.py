"""The overrides of the command line, Hydra's part of them, and the user's own folder of YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from results.errors import UltrasweepError
from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.composing.machine import Machine
from sweep.composing.overrides import sort_overrides
from sweep.grids.expand import expand_all
from sweep.running.launch import launch_settings, slurm_options
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment


def experiments(overrides: list[str], folders: ConfFolders | None = None, **options: list[str]) -> list[Experiment]:
    config = compose_sweep(overrides, folders, extra_where=options.get("where", []))
    return [point.experiment for point in expand_all(config.grids, config.models.__getitem__).points]


@pytest.mark.slow
def test_several_grids_keep_their_own_axes() -> None:
    config = compose_sweep(["+grid=[llama1b_8gpu,llama8b_8gpu]"])
    assert config.name == "llama1b_8gpu+llama8b_8gpu"
    assert config.cluster.name == "h200"
    points = expand_all(config.grids, config.models.__getitem__).points
    assert {(p.grid, p.experiment.model.name) for p in points} == {
        ("llama1b_8gpu", "llama1b"),
        ("llama8b_8gpu", "llama8b"),
    }
    assert [grid.name for grid in compose_sweep(["+grid=llama8b_8gpu", "+grid=llama1b_8gpu"]).grids] == [
        "llama8b_8gpu",
        "llama1b_8gpu",
    ]


def test_axes_are_changed_and_added_from_the_command_line() -> None:
    found = experiments(["grid=llama8b_8gpu", "grid.axes.tp=[1,2]", "grid.axes.seed=[1,2,3]", "grid.axes.pp=2"])
    assert {(e.tp, e.pp) for e in found} == {(1, 2), (2, 2)}
    assert {e.seed for e in found} == {1, 2, 3}


def test_changes_reach_every_grid() -> None:
    found = experiments(["+grid=[llama1b_8gpu,llama8b_8gpu]", "grid.axes.tp=8"])
    assert {(e.model.name, e.tp) for e in found} == {("llama1b", 8), ("llama8b", 8)}


def test_a_derived_value_can_be_taken_over() -> None:
    overrides = [
        "+grid=tiny",
        "~grid.derive.dp",
        "grid.axes.dp=[2]",
        "grid.axes.world_size=4",
        "grid.axes.tp=2",
        "grid.axes.pp=1",
    ]
    assert {(e.dp, e.tp) for e in experiments(overrides)} == {(2, 2)}


@pytest.mark.slow
def test_filters_from_the_command_line() -> None:
    whole = experiments(["+grid=llama8b_8gpu"])
    assert experiments(["+grid=llama8b_8gpu"], where=["tp * pp == 8", "zero_stage == 0"]) == [
        e for e in whole if e.tp * e.pp == 8 and e.zero_stage == 0
    ]
    assert experiments(["+grid=llama8b_8gpu", "grid.where.mine='tp == 2'"]) == [e for e in whole if e.tp == 2]


@pytest.mark.slow
def test_models_are_an_axis() -> None:
    assert {e.model.name for e in experiments(["+grid=llama8b_8gpu", "model=[llama3b,llama70b]"])} == {
        "llama3b",
        "llama70b",
    }
    assert {e.model.name for e in experiments(["+grid=llama8b_8gpu", "model=smollm1.7b"])} == {"smollm1.7b"}


@pytest.mark.slow
def test_a_given_cluster_goes_before_the_grids() -> None:
    assert compose_sweep(["+grid=playbook"]).cluster.name == "h100_efa"
    given = compose_sweep(["+grid=playbook", "cluster=h200", "cluster.reserved_bytes=7 GiB"])
    assert (given.cluster.name, given.cluster.reserved_bytes, given.cluster_given) == ("h200", 7 * 2**30, True)
    suggested = compose_sweep(["+grid=playbook"], cluster="b200")
    assert (suggested.cluster.name, suggested.cluster_given) == ("b200", False)
    assert compose_sweep(["+grid=[one_gpu,playbook]", "cluster=h200"]).cluster.name == "h200"


@pytest.mark.slow
def test_defaults() -> None:
    config = compose_sweep(["+grid=tiny"])
    assert (config.launcher_kind, config.sweep_dir) == ("local", Path("results/tiny"))
    assert (config.measure.warmup_steps, config.measure.timed_steps) == (3, None)
    assert config.budget_gpu_hours is None
    assert compose_sweep(["+grid=tiny", "measure=quick"]).measure.timed_steps == 3
    assert compose_sweep(["+grid=tiny", "launcher=rehearse"]).name == "tiny-rehearsed"
    assert compose_sweep(["+grid=tiny", "name=mine", "results_dir=out"]).sweep_dir == Path("out/mine")


def test_times_may_have_units() -> None:
    words = ["plan.overhead_s=2 min", "plan.deadline.base_s=1 h", "launcher.lease_s=3 min"]
    config = compose_sweep(["+grid=tiny", *words])
    assert (config.plan.overhead_s, config.plan.deadline.base_s) == (120, 3600)
    settings = launch_settings(config, Machine(gpu_name=None, num_gpus=0))
    assert settings.lease_s == 180
    options = slurm_options(
        compose_sweep(["+grid=tiny", "launcher=slurm", "launcher.time_min=4 h", "launcher.mem=500G"])
    )
    assert options is not None
    assert (options.time_min, options.mem) == (240, "500G")


@pytest.mark.slow
def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    for group in ("grid", "model", "cluster"):
        (tmp_path / group).mkdir()
    (tmp_path / "model" / "mini.yaml").write_text(
        "num_layers: 2\nhidden_size: 64\nnum_heads: 4\nnum_kv_heads: 4\nffn_hidden_size: 128\nvocab_size: 256\n"
    )
    (tmp_path / "grid" / "mine.yaml").write_text(
        "cluster: ours\naxes: {model: [mini, tiny], global_batch_size: 4, seq_len: 64, tp: [1, 2]}\n"
    )
    (tmp_path / "cluster" / "ours.yaml").write_text(
        "defaults: ['/device@device: h200', _self_]\nname: ours\nbackend: cuda\ndevices_per_node: 4\n"
        "intra_node: {bandwidth: 1.0e11, latency_s: 1.0e-6}\ninter_node: null\n".replace(
            "'/device@device: h200'", "{/device@device: h200}"
        )
    )
    folders = ConfFolders((tmp_path,))
    config = compose_sweep(["+grid=mine"], folders)
    assert (config.cluster.name, config.cluster.device.name) == ("ours", "NVIDIA H200")
    assert [(e.model.name, e.tp) for e in experiments(["+grid=mine"], folders)] == [
        ("mini", 1),
        ("mini", 2),
        ("tiny", 1),
        ("tiny", 2),
    ]
    assert experiments(["+grid=mine"], folders)[0].model.head_dim == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "no grid given: add .*playbook"),
        (["+grid=playbok"], "no grid called 'playbok'; did you mean 'playbook'"),
        (["+grid=tiny", "model=lama8b"], "no model called 'lama8b'; did you mean 'llama8b'"),
        (["+grid=tiny", "cluster=h100"], "no cluster called 'h100'; did you mean 'h100_efa' or 'h100_ib400'"),
        (["+grid=tiny", "tp=8"], "no option 'tp' at the top level; write grid.axes.tp=8"),
        (["+grid=tiny", "partition=main"], "no option 'partition' at the top level; write launcher.partition=main"),
        (["+grid=tiny", "hydra.launcher.partition=x"], "write launcher=slurm and launcher.OPTION"),
        (
            ["+grid=tiny", "launcher=slurm", "launcher.mail_user=me"],
            "no option 'mail_user' in launcher; write launcher.sbatch.mail_user=me",
        ),
        (["+grid=tiny", "cluster=mi300"], "no cluster called 'mi300'; did you mean 'mi300x'"),
        (["+grid=tiny", "launcher=slrm"], "no launcher called 'slrm'; did you mean 'slurm'"),
        (["+grid=tiny", "cluster=[h200]"], "a sweep has one cluster"),
        (["+grid=[one_gpu,playbook]"], "different clusters .one_gpu for h200, playbook for h100_efa.; choose one"),
        (["+grid=tiny", "budget.gpu_hour=1"], "no option 'gpu_hour' in budget; did you mean 'gpu_hours'"),
        (["+grid=tiny", "bugdet.gpu_hours=1"], "no option 'bugdet' at the top level; did you mean 'budget'"),
        (["+grid=tiny", "name.x=1"], "name is a single value"),
        (["+grid=tiny", "budget.gpu_hours=-1"], "budget.gpu_hours=-1 must be a number above 0"),
        (["+grid=tiny", "budget=3"], "write budget.gpu_hours=NUMBER"),
        (["+grid=tiny", "+budget.gpu_hour=1"], "write budget.gpu_hours=NUMBER"),
        (["+grid=tiny", "grid.axes.tpp=[1]"], "no axis is called 'tpp'; did you mean 'tp'"),
        (["+grid=tiny", "grid.axs.tp=[1]"], "a grid has no 'axs' to change; did you mean 'axes'"),
        (["+grid=tiny", "grid.axes.tp=1,2"], r"write a list, e\.g\. grid\.axes\.tp=\[1,2\]"),
        (["+grid=tiny", "grid.axes.dp=2"], r"dp is an axis and also derived .*add ~grid\.derive\.dp"),
        (["+grid=tiny", "device=h200"], "a device is part of a cluster file; choose it with cluster=NAME"),
        (["+grid=tiny", "hydra.run.dir=x"], "write grid.axes.NAME"),
        (["+grid=tiny", "a=b=c"], "cannot read 'a=b=c'"),
        (["+grid=tiny", "--grid"], "cannot read '--grid'"),
        (["+grid=tiny", "name=${nope}"], "cannot be composed: Interpolation key 'nope' not found"),
        (["+grid=tiny", "name=a/b"], "must be usable as the name of one folder"),
        (["+grid=tiny", "measure.timed_steps=0"], "timed_steps=0 must be a whole number of at least 1"),
        (["+grid=tiny", "measure=3"], "no measure called|a sweep has one measure"),
        (["+grid=tiny", "plan.oom_margin=abc"], "plan.oom_margin='abc' must be a number"),
        (["+grid=tiny", "plan.reuse=2"], "must be true or false"),
        (["+grid=tiny", "plan.deadline=3"], "deadline=3 is not a group of options"),
        (["+grid=tiny", "cluster.devices_per_node=x"], "devices_per_node='x' must be a whole number of at least 1"),
        (["+grid=tiny", "cluster.backend=tpu"], "backend='tpu'; it may be cuda, cpu or rocm"),
        (
            ["+grid=one_gpu", "cluster.inter_node.bandwidth=12.5"],
            "bandwidth=12.5 means 12.5 B/s; between",
        ),
        (
            ["+grid=one_gpu", "cluster.inter_node.bandwidth=50 GX/s"],
            "'GX/s' is not a unit of bandwidth",
        ),
        (["+grid=one_gpu", "+cluster.inter_node.bandwith=1e10"], "inter_node: no option 'bandwith'; did you mean"),
        (["+grid=one_gpu", "plan.overhead_s=12 parsecs"], "'parsecs' is not a unit of time"),
    ],
)
def test_mistakes_are_told_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UltrasweepError, match=message) as error:
        compose_sweep(overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grid.axes.tp=8", "grid.axes.tp=2"], "grid.axes.tp is given twice, grid.axes.tp=8 and grid.axes.tp=2"),
        (["grid.axes.tp=8", "+grid.axes.tp=2"], "for several values write grid.axes.tp="),
        (["grid.axes.tp=8", "grid.axes={pp: 2, tp: 2}"], "grid.axes.tp is given twice"),
        (
            ["grid.subsample.count=8", "~grid.subsample"],
            "grid.subsample is given twice, grid.subsample.count=8 and ~grid",
        ),
        (["grid.axes.tp=8", "~grid.axes.tp"], "grid.axes.tp is given twice, grid.axes.tp=8 and ~grid.axes.tp"),
        (["model=tiny", "grid.axes.model=tiny_moe"], "grid.axes.model is given twice, model=tiny and"),
        (["cluster=cpu", "cluster=h200"], "cluster is given twice, cluster=cpu and cluster=h200; give it once"),
        (["launcher=local", "launcher=rehearse"], "launcher is given twice"),
        (["name=a", "name=b"], "name is given twice"),
        (["budget.gpu_hours=1", "++budget.gpu_hours=2"], "budget.gpu_hours is given twice"),
        (["cluster.nodes=1", "cluster.nodes=2"], "cluster.nodes is given twice"),
        (["grid.where={}"], "an empty mapping changes nothing; write ~grid.where to remove it"),
    ],
)
def test_no_override_is_dropped_in_silence(overrides: list[str], message: str) -> None:
    with pytest.raises(InvalidSweep, match=message):
        sort_overrides(["+grid=tiny", *overrides], ConfFolders())


def test_mistakes_of_all_files_and_sections_are_reported_at_once(tmp_path: Path) -> None:
    for group, text in {
        "model": "num_hidden_layers: 2\nhidden_size: 64\nnum_heads: 4\nnum_kv_heads: 4\nffn_hidden_size: 128\n",
        "grid": "cluster: ours\naxes: {model: ours, tensor_parallel_degree: 2, global_batch_size: 4}\n",
        "cluster": "defaults: [h200, _self_]\nname: ours\ngpus_per_node: 4\nreserved_bytes: 3\n",
    }.items():
        (tmp_path / group).mkdir()
        (tmp_path / group / "ours.yaml").write_text(text)
    with pytest.raises(UltrasweepError) as error:
        compose_sweep(["+grid=ours", "plan.reuse=2", "budget.gpu_hours=-1"], ConfFolders((tmp_path,)))
    said = [message.partition(";")[0] for message in error.value.messages]
    assert said == [
        "model ours: no field 'num_hidden_layers'",
        "model ours: vocab_size must be given",
        "grid ours: no axis is called 'tensor_parallel_degree'",
        "cluster ours: no option 'gpus_per_node'",
        "cluster ours: reserved_bytes=3 means 3 B",
        "plan.reuse=2 must be true or false",
        "budget.gpu_hours=-1 must be a number above 0",
    ]


WHOLE = {
    "cluster": "defaults: [/device@device: ours, _self_]\nname: ours\nbackend: cuda\ndevices_per_node: 8\n"
    "intra_node: {bandwidth: 360 GB/s, latency_s: 4 us}\n",
    "device": "name: ours\nmemory_bytes: 80 GiB\n",
    "model": "num_layers: 2\nhidden_size: 64\nnum_heads: 4\nnum_kv_heads: 4\nffn_hidden_size: 128\nvocab_size: 128\n",
    "grid": "cluster: ours\naxes: {model: ours, global_batch_size: 4}\n",
}


@pytest.mark.parametrize("group", WHOLE)
@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}\n"])
def test_an_empty_file_is_named_with_how_to_begin(group: str, text: str, tmp_path: Path) -> None:
    [message] = _of_files(tmp_path, WHOLE | {group: text})
    begin = {"cluster": "defaults: [h200, _self_]", "model": "num_layers: 32", "device": "name: ours"}
    begin["grid"] = "axes: {model: llama8b, global_batch_size: 512}"
    assert message == f"{tmp_path / group / 'ours.yaml'} is empty; a {group} begins for example with {begin[group]}"


@pytest.mark.parametrize(
    ("group", "text", "said"),
    [
        (
            "cluster",
            "name: ours\nbackend: cuda\n",
            "cluster ours: device, devices_per_node, intra_node must be given; ",
        ),
        ("cluster", "backend: cpu\nname:\ndevice:\n", "cluster ours: name, device, devices_per_node, intra_node must"),
        (
            "device",
            "name: ours\n",
            "cluster ours: device: memory_bytes must be given; write for example memory_bytes: ",
        ),
        (
            "device",
            "name:\nmemory_bytes: 80 GiB\n",
            "cluster ours: device: name must be given; write for example name: ",
        ),
        (
            "model",
            "num_layers: 4\nhidden_size: 64\n",
            "model ours: num_heads, num_kv_heads, ffn_hidden_size, vocab_size m",
        ),
        ("grid", "axes:\n", "grid ours has no axes; write for example axes: {model: llama8b, global_batch_size: 512}"),
        ("grid", "axes: {model: ours}\n", "grid ours: global_batch_size is missing; add it as an axis or derive it"),
    ],
)
def test_a_file_without_what_it_needs_is_named(group: str, text: str, said: str, tmp_path: Path) -> None:
    [message] = _of_files(tmp_path, WHOLE | {group: text})
    assert message.startswith(said)
    files = message.rpartition(" (")[2].rstrip(")").split(", ")
    assert str(tmp_path / group / "ours.yaml") in files


def _of_files(folder: Path, texts: dict[str, str]) -> tuple[str, ...]:
    """The mistakes in a sweep of a user's files."""
    for group, text in texts.items():
        (folder / group).mkdir()
        (folder / group / "ours.yaml").write_text(text)
    with pytest.raises(UltrasweepError) as error:
        compose_sweep(["+grid=ours", "cluster=ours"], ConfFolders((folder,)))
    return error.value.messages


def test_several_mistakes_are_printed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+grid=tiny", "plan.reuse=2", "budget.gpu_hours=-1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "ultrasweep: 2 mistakes:",
        "  plan.reuse=2 must be true or false",
        "  budget.gpu_hours=-1 must be a number above 0",
    ]


def test_overrides_that_all_count_are_taken() -> None:
    words = ["+grid=tiny", "+grid=one_gpu", "model=tiny", "model=llama1b", "cluster=h200", "cluster.nodes=2"]
    words += ["~grid.subsample", "grid.subsample.count=2", "grid.axes={tp: 1}", "grid.axes.pp=1"]
    given = sort_overrides(words, ConfFolders())
    assert (given.grids, given.models) == (("tiny", "one_gpu"), ("tiny", "llama1b"))


def test_a_rehearsal_does_not_take_devices_that_it_will_not_use() -> None:
    config = compose_sweep(["+grid=tiny", "launcher=rehearse", "launcher.num_devices=4"])
    with pytest.raises(InvalidSweep, match=r"launcher\.num_devices=4: a rehearsal uses one device; leave it out"):
        launch_settings(config, Machine(gpu_name=None, num_gpus=0))


@pytest.mark.slow
def test_clusters_to_learn_from_are_read_by_name() -> None:
    config = compose_sweep(["+grid=tiny", "plan.learn_from=[h200,h100_efa,h200]"])
    assert [one.name for one in config.learn_from] == ["h200", "h100_efa"]
    assert compose_sweep(["+grid=tiny"]).learn_from == ()


@pytest.mark.parametrize(("given", "said"), [("[h201]", "h200"), ("h200", "list"), ("[3]", "plan.learn_from")])
def test_wrong_clusters_to_learn_from_are_refused(given: str, said: str) -> None:
    with pytest.raises(UltrasweepError, match=said):
        compose_sweep(["+grid=tiny", f"plan.learn_from={given}"])


@pytest.mark.parametrize("devices", [4, 8])
def test_the_first_grid_of_a_cluster_keeps_tensor_parallelism_inside_its_nodes(devices: int) -> None:
    points = experiments(["+grid=first_day", "cluster=h200", f"cluster.devices_per_node={devices}"])
    assert {e.world_size for e in points} == {devices, 2 * devices}
    assert {e.tp for e in points} == {1, 2, devices}
    assert any(e.pp == 2 and e.tp == 2 for e in points) and len(points) >= 6


@pytest.mark.slow
def test_conditions_may_use_the_devices_of_a_node() -> None:
    where = ["tp < devices_per_node"]
    words = ["+grid=llama8b_8gpu", "cluster=h200"]
    assert max(e.tp for e in experiments(words)) == 8
    assert max(e.tp for e in experiments(words, where=where)) == 4
    assert max(e.tp for e in experiments([*words, "cluster.devices_per_node=4"], where=where)) == 2
