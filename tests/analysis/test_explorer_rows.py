"""What the explorer says of a row: its columns, and the command that runs it again."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest

from analysis.explorer import pack_texts, row_data
from analysis.rows import cohorts
from analysis.rows.canonical import with_canonical_models
from results.tables.schema import ATTEMPTS
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.grids.expand import expand_all
from tests.analysis import synthetic
from tests.analysis.browser import Browser
from tests.analysis.conftest import frame_of
from tests.analysis.explorer_page import (
    POINTS,
    many,
    opened,
    results_of,
    written,
)
from tests.sampling import SEED
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec import experiment as ex
from workloads.spec.config_json.read import name_of
from workloads.spec.experiment import LATER_FIELDS

pytestmark = [pytest.mark.xdist_group("the page of recorded rows"), pytest.mark.drawn(one_in=2)]


@pytest.fixture(scope="module")
def recorded(recorded_page: tuple[Path, pd.DataFrame]) -> tuple[Path, pd.DataFrame]:
    return recorded_page


def test_the_command_plans_exactly_the_row(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    chosen = frame.drop_duplicates(["model", "method", "recompute", "compile", "zero_stage", "pp_schedule"])
    assert len(chosen) > 20
    for folder in set(frame["command"].str.extract(r"--conf[= ](\S+)")[0].dropna()):  # grids ship beside their rows
        assert (Path(__file__).parents[2] / folder / "grid").is_dir(), folder
    renamed = with_canonical_models(frame)  # a new run of an experiment gets today's id
    of_others = chosen[chosen["engine"] != ex.ENGINE].drop_duplicates(["engine", "model"])
    for row in {*of_others.index, *random.Random(SEED).sample(list(chosen.index), 8)}:
        made = browser.js("Explorer.rerun(arguments[0])", int(row))
        assert made["words"][:4] == ["python", "-m", "sweep", "run"]
        words = made["words"][4:]
        if words[0] == "--conf":
            words = words[2:]
        if any(word.startswith("model=") and word.endswith(".json") for word in words):
            continue  # its model was a file that is not beside its rows
        config = compose_sweep(words, ConfFolders())
        points = expand_all(config.grids, config.models.__getitem__).points
        [point] = points
        assert row not in of_others.index or point.experiment.model.name == frame["model"][row]
        assert point.experiment.id == renamed["experiment_id"][row] or made["notes"], made
        assert config.cluster.name == frame["cluster"][row]
        assert config.launcher_kind == frame["launcher"][row]
        assert not config.plan.reuse and config.plan.run_predicted_oom
        if pd.notna(frame["timed_steps"][row]) and frame["engine"][row] == ex.ENGINE:
            assert config.measure.timed_steps == frame["timed_steps"][row]


def test_commands_of_odd_rows(browser: Browser, tmp_path: Path) -> None:
    point = ex.Experiment.canonical(
        model=synthetic.MODELS[0], dp_replicate=2, dp_shard=2, tp=2, cp=2, pp=2, zero_stage=2, global_batch_size=64,
        micro_batch_size=2, sequence_parallel=False, precision="fp32", attention="flash", compile="block", seed=7,
        virtual_stages=2, pp_schedule="interleaved_1f1b", recompute="full", recompute_every=3, seq_len=8192,
    )  # fmt: skip
    words = ["python", "-m", "sweep", "run", "--conf", "my conf", "+grid=mine", "launcher.partition=a b", "name=x"]
    rows = [
        synthetic.attempt(point, 0, command=shlex.join(words), launcher="slurm", outcome="ok"),
        synthetic.attempt(POINTS[0], 1, engine="nanotron", hidden_size=77),
        synthetic.attempt(POINTS[1], 2, seq_len=None),
        synthetic.attempt(POINTS[2], 3, engine_version="1"),
    ]
    page = written(results_of(frame_of(rows), tmp_path), tmp_path)
    opened(browser, page, "#r.f=1")
    ids = browser.js("Array.from({length: 4}, (_, row) => Explorer.columns.get('attempt_id').value(row))")
    made = {row_id[:6]: browser.js("Explorer.rerun(arguments[0])", row) for row, row_id in enumerate(ids)}
    full = made["000000"]["words"]
    assert full[4:6] == ["--conf", "my conf"]
    assert "launcher=slurm" in full and "launcher.partition=a b" in full
    plain = [word for word in full[6:] if not word.startswith("launcher")]
    [planned] = expand_all(*(lambda c: (c.grids, c.models.__getitem__))(compose_sweep(plain, ConfFolders()))).points
    assert ex.to_dict(planned.experiment) | {"model": 0} == ex.to_dict(point) | {"model": 0}
    assert "No model file of this project has the shape" in made["000001"]["missing"]
    assert "seq_len" in made["000002"]["missing"]
    assert "engine version 1" in " ".join(made["000003"]["notes"])
    browser.js("document.querySelector('#runs-table [data-row=\"0\"]').click()")
    if ids[0].startswith("000000"):
        assert shlex.split(browser.text("#runs-drawer pre.command")) == full


def test_a_model_that_was_a_file_is_named_by_its_file(browser: Browser, tmp_path: Path) -> None:
    cached = "models--owner--Name-8B/snapshots/0123abc"
    places = ["cut.json", "my model/config.json", f"{cached}/config.json"]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("{}")
    given = [str(tmp_path / place) for place in (*places, "my model", cached)]
    lists = [f"grid.axes.model=[llama8b,'{given[1]}',{given[0]}]", f"grid.axes.model={given[0]}", f"model={given[2]}"]
    words = [f"model={path}" for path in given] + lists
    rows = [
        synthetic.attempt(POINTS[0], n, model=name_of(Path(path)), engine=ex.ENGINE, command=shlex.join(["run", word]))
        for n, (path, word) in enumerate(zip([*given, given[1], given[0], given[2]], words, strict=True))
    ]
    rows.append(rows[0] | {"attempt_id": "plain", "command": f"run model={given[1]}"})
    opened(browser, written(results_of(frame_of(rows), tmp_path), tmp_path))
    ids = browser.js("Array.from({length: 9}, (_, row) => Explorer.columns.get('attempt_id').value(row))")
    asked = {row_id: browser.js("Explorer.rerun(arguments[0])", n)["words"] for n, row_id in enumerate(ids)}
    assert len(asked) == len(rows)
    for row, path in zip(rows, [*given, given[1], given[0], given[2], rows[0]["model"]], strict=True):
        [model] = [word for word in asked[row["attempt_id"]] if word.startswith("model=")]
        assert model.removeprefix("model=").strip("'") == path


def test_columns_keep_what_is_unknown_and_what_is_exact() -> None:
    rows = synthetic.attempts(POINTS[:3], outcome="ok")
    rows[1] |= {"peak_allocated_bytes": None, "step_time_s": None, "loss_agrees": None, "recompute": None}
    rows[2] |= {"peak_allocated_bytes": 123_456_789_012_345, "step_time_s": 0.123456789}
    parts = cohorts.split(frame_of(rows))
    data = row_data.encode(row_data.table(parts), parts)
    columns = {column["name"]: column for column in data["columns"]}
    peak = columns["peak_allocated_bytes"]
    assert peak["codes"][1] == -1
    assert peak["levels"][peak["codes"][2]] == 123_456_789_012_345
    step = columns["step_time_s"]
    assert step["levels"][step["codes"][2]] == 0.1234568
    assert columns["loss_agrees"]["levels"] == ["yes"] and columns["loss_agrees"]["codes"] == [0, -1, 0]
    assert columns["recompute"]["codes"][1] == -1
    assert "scheduler_job" not in columns  # no row has one
    assert "config_json" not in columns and "losses" not in columns
    assert set(columns) <= {*ATTEMPTS.names, "cohort", "workload", "degrees", "batching", "layout"}


def test_names_of_many_runs_are_packed_and_unpacked() -> None:
    names = [f"m{n % 3}.5b-dp{n % 8}-{n:05x}.a1" for n in range(100)] + ["", "-_", "plain", 'a"b-c_d']
    packed = pack_texts.pack(names)
    assert packed is not None and pack_texts.unpack(packed) == names
    alike = [f"run-{n}-{n * 7919 % 97:x}" for n in range(200)]
    packed = pack_texts.pack(alike)
    assert packed is not None and "form" not in packed and pack_texts.unpack(packed) == alike
    assert packed["forms"][0]["places"][0] == {"levels": ["run"], "codes": [0] * 200}
    assert (
        pack_texts.unpack(pack_texts.pack([f"job-{14113488 + n}-{n:03}" for n in range(99)]) or {})[7]
        == "job-14113495-007"
    )
    assert pack_texts.steps([5, 6, 7, 7]) is None and pack_texts.steps([1000, 1001, 999]) == [1000, 1, -2]
    assert pack_texts.steps([1000, None, 1001]) is None and pack_texts.steps([1000, 1000.5]) is None
    assert pack_texts.pack(["-" * n for n in range(100)]) is None
    assert pack_texts.pack(names[:10]) is None


@pytest.mark.parametrize("rows", [401, 1000])
def test_packed_names_reach_the_page(browser: Browser, tmp_path: Path, rows: int) -> None:
    frame = many(rows)
    frame = frame.assign(attempt_id=[f"a.{n % 7}-{n}{'_x' if n % 5 == 0 else ''}" for n in range(rows)])
    opened(browser, written(results_of(frame, tmp_path), tmp_path))
    assert browser.js("'texts' in Explorer.columns.get('attempt_id').packed")
    read = "Array.from({length: arguments[0]}, (_, row) => Explorer.columns.get('attempt_id').value(row))"
    assert sorted(browser.js(read, rows)) == sorted(frame["attempt_id"])


def test_the_panel_says_what_the_row_says(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    oom = int(frame.index[(frame["outcome"] == "oom") & (frame["method"] == "measured")][0])
    fine = int(frame.index[frame["outcome"] == "ok"][0])
    for row in (oom, fine):
        opened(browser, page, f"#r.row={frame['attempt_id'].iloc[row]}")
        told = dict(
            browser.js(
                "[...document.querySelectorAll('[data-part=everything] tr')]"
                ".map(r => [r.cells[0].textContent, r.cells[1].textContent])"
            )
        )
        values = frame.iloc[row].dropna()
        for name, text in told.items():
            value = values[name]
            if isinstance(value, pd.Timestamp):
                assert text == f"{value:%Y-%m-%d %H:%M:%S}"
            elif isinstance(value, bool | np.bool_):
                assert text == ("yes" if value else "no")
            elif isinstance(value, float | int | np.number):
                assert float(text) == pytest.approx(float(value), rel=1e-6), name
            else:
                assert text == (", ".join(value) if isinstance(value, np.ndarray) else value), name
        # Nothing known is missing but what the page never shows.
        hidden = {
            "config_json",
            "accumulation",
            "log_dir",
            "losses",
            "grad_norms",
            "device_ids",
            "peak_allocated_by_stage_bytes",
            "nccl_transports",
        }
        hidden |= {"traffic", "breakdown_comm_by_axis"}  # lists by axis and operation
        assert {str(name) for name in values.index} - set(told) - hidden <= {
            n for n in values.index if n.startswith("first_steps") or n.endswith(("_by_stage_s", "_by_step_bytes"))
        }
        shown_text = {
            e.get_attribute("data-column"): browser.js("arguments[0].lastChild.textContent", e)
            for e in browser.all("#runs-drawer dl > div")
        }
        assert shown_text["tp"] == str(int(values["tp"]))
        assert shown_text["model"] == values["model"]
        peak = re.search(r"peak memory([\d.]+) GiB", browser.text("[data-part=predicted]"))
        assert peak and float(peak[1]) == pytest.approx(values["predicted_peak_bytes"] / 2**30, abs=0.06)
    assert "Wall time" in browser.text("[data-part=time]")
    parts = sum(values[name] for name in ("forward_backward_s", "reduce_exposed_s", "optimizer_s", "pipeline_idle_s"))
    share = 100 * values["forward_backward_s"] / values["step_time_s"]
    assert parts <= 1.05 * values["step_time_s"]
    assert f"{share:.1f} %" in browser.text("[data-part=time]")
    assert "activations and rest" in browser.text("[data-part=memory]")
    opened(browser, page, f"#r.row={frame['attempt_id'].iloc[oom]}")
    assert frame["evidence"].iloc[oom] in browser.text("[data-part=outcome]")
    assert browser.text("#runs-drawer .badge") == "out of memory"


def test_a_prediction_has_the_interval_that_was_recorded_with_it(browser: Browser, tmp_path: Path) -> None:
    ends = ("predicted_step_time_low_s", "predicted_step_time_high_s")
    recorded = {"outcome": "ok", "predicted_step_time_s": 1.0, **dict(zip(ends, (0.8, 1.25), strict=True))}
    expected = {
        "inside": (recorded | {"step_time_s": 1.25}, "; the measured one lies inside."),
        "above": (recorded | {"step_time_s": 1.26}, "; the measured one lies above."),
        "below": (recorded | {"step_time_s": 0.79}, "; the measured one lies below."),
        "nothing measured": (recorded | {"step_time_s": 1.0, "method": "rehearsed"}, "."),
        "out of memory": (recorded | {"outcome": "oom"}, "."),
        "older": (recorded | {"step_time_s": 1.0} | dict.fromkeys(ends), None),
    }
    rows = [
        synthetic.attempt(POINTS[number], number, attempt_id=name, **columns)
        for number, (name, (columns, _)) in enumerate(expected.items())
    ]
    page = written(results_of(frame_of(rows), tmp_path), tmp_path)
    for name, (_, end) in expected.items():
        opened(browser, page, f"#r.row={name.replace(' ', '%20')}")
        said = browser.text("[data-part=predicted]").replace("\xa0", " ")
        if end is None:
            assert "interval" not in said
        else:
            assert said.endswith(f"90 % interval of the predicted step time: 0.8 to 1.25 s{end}")


def test_the_configuration_is_the_rows_own(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    """`config_json` is not in the page: it is put together from columns and shapes, and is the same experiment."""
    page, frame = recorded
    opened(browser, page)
    read = "name => Explorer.columns.get(name)?.value(row) ?? null"
    made = browser.js(
        f"Array.from({{length: {len(frame)}}}, (_, row) => RowExperiment.of({read}, Explorer.data.widget))"
    )
    for row, text in enumerate(frame["config_json"]):
        theirs = json.loads(text)
        if "layers" in theirs["model"]:
            assert "list of layers" in made[row]["missing"]
            continue
        # Rows from before there was a choice have its one value of then.
        assert made[row]["config"] == LATER_FIELDS | theirs, row
        assert ex.from_json(json.dumps(made[row]["config"])) == ex.from_json(text)
        assert made[row]["exact"]
    opened(browser, page, f"#r.row={frame['attempt_id'].iloc[7]}")
    written_out = json.loads(browser.text("#runs-drawer pre.config"))
    assert written_out == LATER_FIELDS | json.loads(frame["config_json"].iloc[7])


def test_memory_and_pipeline_are_those_of_the_row(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    listed = frame["config_json"].map(lambda text: "layers" in json.loads(text)["model"])
    odd = int(random.Random(SEED).choice(frame.index[listed]))
    opened(browser, page, f"#r.row={frame['attempt_id'].iloc[odd]}&r.view=memory")
    browser.wait("document.querySelector('#runs-m-total')?.dataset.bytes")
    warning = browser.text("#runs-drawer p.warning")
    assert "list of layers" in warning and warning.endswith("Below is another layout, to try.")
    first = frame[frame["outcome"].eq("ok") & frame["method"].eq("measured") & ~listed]
    rows = first.drop_duplicates(["model", "pp_schedule", "virtual_stages", "recompute"]).index[::2]
    for row in random.Random(SEED).sample(list(rows), 4):
        opened(browser, page, f"#r.row={frame['attempt_id'].iloc[row]}&r.view=memory")
        browser.wait("document.querySelector('#runs-m-total')?.dataset.bytes")
        point = dataclasses.replace(ex.from_json(frame["config_json"][row]), engine_version=ex.ENGINE_VERSION)
        assert browser.js("Number(document.querySelector('#runs-m-total').dataset.bytes)") == (
            estimate_memory(point).peak_bytes
        )
        assert f"{frame['peak_allocated_bytes'][row] / 2**30:.4g}" in browser.text("[data-part=found]")
    piped = first[(first["pp"] > 1) & (first["virtual_stages"] > 1) & first["pipeline_idle_s"].notna()]
    for row in piped.drop_duplicates("pp_schedule").index:
        values = frame.loc[row]
        opened(browser, page, f"#r.row={values['attempt_id']}&r.view=pipeline")
        browser.wait("document.querySelector('#runs-p-chart [data-rank]')")
        shown = browser.js(
            "['schedule', 'ranks', 'microbatches', 'chunks'].map(n => document.querySelector(`#runs-p-${n}`).value)"
        )
        names = ("pp_schedule", "pp", "num_microbatches", "virtual_stages")
        assert shown == [str(values[name]) for name in names]
        share = values["pipeline_idle_s"] / (values["pipeline_idle_s"] + values["forward_backward_s"])
        assert f"Waiting takes {100 * share:.1f} % of both in the run" in browser.text("#runs-p-measured")
        simulated = browser.text("#runs-p-share")
        assert f"and {simulated} in the simulation" in browser.text("#runs-p-measured")


def test_a_kept_trace_is_linked(browser: Browser, tmp_path: Path) -> None:
    rows = synthetic.attempts(POINTS[:3], outcome="ok")
    sweep = synthetic.make_sweep(tmp_path / "results" / "my sweep", rows)
    for row, name in zip(rows, ("here", "gone", "outside"), strict=True):
        row["trace_file"] = f"attempts/{row['attempt_id']}/{name}.json.gz"
    rows[2]["trace_file"] = "../../outside.json.gz"
    (sweep / "attempts" / rows[0]["attempt_id"]).mkdir(parents=True, exist_ok=True)
    (sweep / rows[0]["trace_file"]).write_bytes(b"trace")
    (tmp_path / "outside.json.gz").write_bytes(b"not of the sweep")
    frame = frame_of([row | {"sweep": "my sweep"} for row in rows])
    (tmp_path / "page").mkdir()
    page = written(results_of(frame, tmp_path / "results"), tmp_path / "page")
    opened(browser, page)
    traces = browser.js("Explorer.data.traces")
    [row] = traces
    assert frame["trace_file"].iloc[int(row)].endswith("here.json.gz")
    assert (page.parent / unquote(traces[row])).read_bytes() == b"trace"
    for at, text in enumerate(frame["trace_file"]):
        browser.js("Explorer.open(arguments[0])", frame["attempt_id"].iloc[at])
        assert text in browser.text("#runs-drawer .trace")
        assert len(browser.all("#runs-drawer .trace a")) == (str(at) == row)
