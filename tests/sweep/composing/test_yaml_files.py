"""Files of a user: mistakes with their place, files that would grow without end, names that hide each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.composing.conffiles import PACKAGED, ConfFolders
from sweep.composing.config import compose_sweep
from sweep.composing.machine import clusters_of_device
from sweep.composing.yaml_files import MOST_VALUES, read_yaml
from workloads.spec.errors import InvalidSweep

AXES = "axes: {model: tiny, global_batch_size: 4, seq_len: 128, precision: fp32}\n"


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def told(folder: Path, *words: str) -> str:
    with pytest.raises(InvalidSweep) as error:
        compose_sweep(list(words), ConfFolders((folder,)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_aliases_that_explode_are_refused_at_once(tmp_path: Path) -> None:
    levels = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    write(tmp_path, "grid/bomb.yaml", AXES + "\n".join(levels))
    message = told(tmp_path, "+grid=bomb")  # to expand it would take hours, more than a test may
    assert (
        f"bomb.yaml: with its aliases (*NAME) expanded it holds about 4e+09 values; at most {MOST_VALUES:,}" in message
    )


def test_ordinary_aliases_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "tps: &tps [1, 2]\naxes: {tp: *tps, pp: *tps}\n")
    assert read_yaml(path)["axes"] == {"tp": [1, 2], "pp": [1, 2]}


def test_a_value_that_holds_itself_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "a: &a [1, *a]\n")
    with pytest.raises(InvalidSweep, match="line 1: an alias refers to a value that contains it"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"description: caf\xe9\n" + AXES.encode(), "is not UTF-8 text (byte 17 of it); save it as UTF-8"),
        ("axes: {model: tiny,\n  tp: [1, 2}\n", ", line 2: while parsing a flow sequence: expected ',' or ']'"),
        ("axes:\n  tp: 1\n tp: 2\n", ", line 3: "),
        ("axes: {tp: 1}\naxes: {tp: 2}\n", ", line 2: while constructing a mapping: found duplicate key axes"),
        ("- a\n- b\n", "does not hold a mapping"),
        ("axes: " + "[" * 200_000 + "]" * 200_000, "it is nested too deeply"),
        ("axes: {seed: " + "9" * 5000 + "}", "bad.yaml"),
        ("12\n", "bad.yaml"),
    ],
)
def test_mistakes_in_a_file_are_told_with_its_name_and_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    write(tmp_path, "grid/bad.yaml", text)
    said = told(tmp_path, "+grid=bad")
    assert "grid/bad.yaml" in said
    assert message in said


def test_a_mistake_in_a_file_that_hydra_reads_has_its_place_too(tmp_path: Path) -> None:
    write(tmp_path, "cluster/ours.yaml", "defaults: [h200, _self_]\nname: ours\ninter_node: {bandwidth: 1e10\n")
    said = told(tmp_path, "+grid=one_gpu", "cluster=ours")
    assert "cluster/ours.yaml, line 4: while parsing a flow mapping" in said


def test_a_missing_base_is_told_with_the_known_names(tmp_path: Path) -> None:
    write(tmp_path, "cluster/ours.yaml", "defaults: [h100_ib40, _self_]\nname: ours\n")
    said = told(tmp_path, "+grid=one_gpu", "cluster=ours")
    assert "cluster/ours.yaml: no cluster called 'h100_ib40'; did you mean 'h100_ib400'? known: a100_40gb" in said
    write(tmp_path, "cluster/ours.yaml", "defaults: [{/device@device: mi300}, _self_]\nname: ours\n")
    assert "no device called 'mi300'; did you mean 'mi300x'?" in told(tmp_path, "+grid=one_gpu", "cluster=ours")


def test_files_that_are_built_on_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "cluster/a.yaml", "defaults: [b, _self_]\nname: a\n")
    write(tmp_path, "cluster/b.yaml", "defaults: [a, _self_]\nname: b\n")
    assert "is built on itself" in told(tmp_path, "+grid=one_gpu", "cluster=a")


def test_a_folder_is_no_file_and_is_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "grid" / "mine.yaml").mkdir(parents=True)
    said = told(tmp_path, "+grid=mine")
    assert "no grid called 'mine'" in said
    assert "did you mean 'mine'" not in said and "mine" not in said.partition("known:")[2]


@pytest.mark.slow
def test_a_file_with_the_name_of_a_shipped_one_is_not_ignored(tmp_path: Path) -> None:
    shipped = (PACKAGED / "cluster" / "h200.yaml").read_text()
    write(tmp_path, "cluster/h200.yaml", shipped)
    assert (
        compose_sweep(["+grid=one_gpu"], ConfFolders((tmp_path,))).cluster.name == "h200"
    )  # a plain copy does no harm
    write(tmp_path, "cluster/h200.yaml", shipped.replace("360.0e9", "180.0e9"))
    with pytest.raises(InvalidSweep, match=r"h200\.yaml has the name of a cluster that ships with the program"):
        ConfFolders((tmp_path,))


@pytest.mark.slow
def test_a_grid_built_on_another_keeps_its_cluster(tmp_path: Path) -> None:
    write(tmp_path, "grid/base.yaml", f"cluster: h100_efa\n{AXES}")
    write(tmp_path, "grid/mine.yaml", "defaults: [base, _self_]\naxes: {tp: [1, 2]}\n")
    write(tmp_path, "grid/shipped.yaml", "defaults: [llama8b_8gpu, _self_]\naxes: {tp: [1, 2]}\n")
    write(tmp_path, "grid/other.yaml", "defaults: [base, _self_]\ncluster: b200\n")
    folders = ConfFolders((tmp_path,))
    assert compose_sweep(["+grid=mine"], folders).cluster.name == "h100_efa"
    assert compose_sweep(["+grid=shipped"], folders).cluster.name == "h200"
    assert compose_sweep(["+grid=other"], folders).cluster.name == "b200"
    assert compose_sweep(["+grid=mine", "cluster=h200"], folders).cluster.name == "h200"


@pytest.mark.slow
def test_clusters_built_on_others_are_found_by_their_device(tmp_path: Path) -> None:
    write(tmp_path, "cluster/ours.yaml", "defaults: [a100_80gb, _self_]\nname: ours\n")
    write(tmp_path, "cluster/deeper.yaml", "defaults: [ours, _self_]\nname: deeper\ndevice: {driver_names: [A B C]}\n")
    write(
        tmp_path,
        "cluster/changed.yaml",
        "defaults: [a100_80gb, _self_, override /device@device: b200]\nname: changed\n",
    )
    folders = ConfFolders((tmp_path,))
    assert clusters_of_device(folders, "NVIDIA A100-SXM4-80GB") == ["ours"]  # before the shipped one
    assert clusters_of_device(folders, "A B C") == ["deeper"]
    assert clusters_of_device(folders, "NVIDIA B200") == ["changed"]
    assert clusters_of_device(ConfFolders(), "NVIDIA B200") == ["b200"]


@pytest.mark.slow
def test_a_cluster_file_may_hold_quantities_with_units(tmp_path: Path) -> None:
    text = "defaults: [h200, _self_]\nname: ours\nnodes: 4\ninter_node: {bandwidth: 12.5 GB/s, latency_s: 5 us}\n"
    write(tmp_path, "cluster/ours.yaml", text)
    cluster = compose_sweep(["+grid=one_gpu", "cluster=ours"], ConfFolders((tmp_path,))).cluster
    assert cluster.inter_node is not None
    assert (cluster.inter_node.bandwidth, cluster.inter_node.latency_s, cluster.nodes) == (12.5e9, 5e-6, 4)
    changed = compose_sweep(
        ["+grid=one_gpu", "cluster=ours", "cluster.inter_node.bandwidth=50 GB/s", "cluster.device.memory_bytes=80GiB"],
        ConfFolders((tmp_path,)),
    ).cluster
    assert changed.inter_node is not None
    assert (changed.inter_node.bandwidth, changed.device.memory_bytes) == (50e9, 80 * 2**30)
