"""The memory view of the explorer, driven through its inputs as a user would, against the planner."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from analysis.explorer.model_data import models_json
from results.text.numbers import GIB
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import SweepConfig, compose_sweep
from sweep.grids.expand import Expansion, GridPoint
from sweep.planning.plan import make_plan
from tests.analysis import synthetic
from tests.analysis.browser import Browser, Keys
from tests.analysis.conftest import frame_of
from tests.analysis.explorer_page import without_rows
from tests.sampling import sampled
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.params import num_params
from workloads.rules.layout_rules import violations
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec, model_from_dict

pytestmark = pytest.mark.drawn(one_in=2)

SHIPPED = [model_from_dict(fields) for fields in models_json()["models"]]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_rows(tmp_path_factory.mktemp("explorer"))


@pytest.fixture
def tab(browser: Browser, page: Path) -> Browser:
    browser.open(page)
    return opened(browser)


def opened(browser: Browser) -> Browser:
    browser.wait("window.Explorer")
    browser.click("#runs-open-memory")
    browser.wait("document.querySelector('#runs-m-tiles .w-tile') !== null")
    return browser


def type_in(browser: Browser, name: str, value: int | float | str) -> None:
    """Into a number's box or a list of words, as a user would: the page hears an input event."""
    browser.js(
        "((box, value) => { box.value = value; box.dispatchEvent(new Event('input', {bubbles: true})); })"
        "(document.querySelector(`#runs-m-${arguments[0]}`), arguments[1])",
        name,
        str(value),
    )


def only(experiment: Experiment) -> Expansion:
    return Expansion(points=(GridPoint(grid="here", experiment=experiment),), duplicates=0, not_sampled=0)


def total(browser: Browser) -> int:
    return int(browser.js("document.querySelector('#runs-m-total').dataset.bytes"))


SETTINGS: tuple[dict[str, int | float | str], ...] = (
    {"model": "llama1b", "dp_shard": 8, "zero_stage": 3, "recompute": "full"},
    {"model": "llama70b", "dp_shard": 1, "zero_stage": 0, "tp": 8, "pp": 4, "num_microbatches": 32},
    {"model": "llama70b", "tp": 8, "pp": 4, "pp_schedule": "interleaved_1f1b", "virtual_stages": 5},
    {"model": "llama405b", "dp_replicate": 2, "dp_shard": 16, "zero_stage": 3, "pp": 8, "pp_schedule": "gpipe"},
    {"model": "deepseek_v3", "dp_shard": 64, "zero_stage": 1, "ep": 32, "pp": 4, "precision": "fp8_rowwise"},
    {"model": "mixtral_8x7b", "dp_shard": 8, "tp": 2, "ep": 4, "etp": 2, "routing": "skewed", "routing_imbalance": 2.5},
    {"model": "mixtral_8x7b", "dp_shard": 8, "ep": 8, "routing": "learned", "capacity_factor": 1.25},
    {"model": "llama8b", "dp_shard": 8, "pp": 4, "recompute": "full", "recompute_every": 3},
    {"model": "llama1b", "recompute": "norm+swiglu", "recompute_every": 2},
    {"model": "smollm3_3b", "tp": 2, "cp": 4, "seq_len": 131072, "precision": "fp32", "compile": "block"},
)


def spelled(settings: dict[str, int | float | str]) -> Experiment:
    """What the inputs spell, in Python: the page's defaults, changed by ``settings``."""
    defaults = {"model": "llama8b", "dp_shard": 4, "zero_stage": 2, "micro_batch_size": 2, "num_microbatches": 4}
    fields: dict[str, Any] = {**defaults, **settings}
    name = fields.pop("model")
    model = next(shape for shape in SHIPPED if shape.name == name)
    rounds = fields.pop("num_microbatches") * fields.get("dp_replicate", 1) * fields["dp_shard"]
    batch = rounds * fields["micro_batch_size"]
    if fields.get("pp_schedule") != "interleaved_1f1b":
        fields.pop("virtual_stages", None)
    return Experiment.canonical(model=model, global_batch_size=batch, **fields)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings["model"]))
def test_shown_bytes_are_the_planners(tab: Browser, settings: dict[str, int | float | str]) -> None:
    for name, value in settings.items():
        type_in(tab, name, value)
    planned = estimate_memory(spelled(settings))
    assert total(tab) == planned.peak_bytes
    assert tab.text("#runs-m-total") == f"{planned.peak_bytes / GIB:,.2f} GiB"
    fullest = planned.stages[planned.peak_stage]
    for category in CATEGORIES:
        row = f"[...document.querySelectorAll('.w-category')].find(r => r.textContent.includes('{category}'))"
        assert tab.js(f"{row}.querySelector('.w-exact').textContent") == f"{getattr(fullest, f'{category}_bytes'):,}"
    tab.wait(f"Number(document.querySelector('#runs-m-tiles').dataset.bytes) === {planned.peak_bytes}")


def test_any_stage_can_be_looked_at(tab: Browser) -> None:
    settings = SETTINGS[1]
    for name, value in settings.items():
        type_in(tab, name, value)
    planned = estimate_memory(spelled(settings))
    assert planned.peak_stage != 3
    type_in(tab, "stage", 3)
    tab.js("document.querySelector('#runs-m-stage').dispatchEvent(new Event('change'))")
    tab.wait(f"Number(document.querySelector('#runs-m-tiles').dataset.bytes) === {planned.stages[3].peak_bytes}")
    assert total(tab) == planned.peak_bytes


@cache
def on_cluster(name: str) -> SweepConfig:
    return compose_sweep(["+grid=tiny", f"cluster={name}"])


@pytest.mark.parametrize("seq_len", sampled([2048, 4096, 5120, 8192, 16384, 49152], 3))
def test_devices_are_judged_as_the_planner_judges(tab: Browser, seq_len: int) -> None:
    type_in(tab, "seq_len", seq_len)
    experiment = spelled({"seq_len": seq_len})
    for cluster in models_json()["clusters"]:
        config = on_cluster(cluster["name"])
        assert config.cluster.usable_bytes == cluster["usable_bytes"]
        [point] = make_plan(config, only(experiment), "measured").points
        line = f"document.querySelector('.w-fit[data-clusters~={cluster['name']}]')"
        left_out = tab.js(f"{line}.classList.contains('w-no')")
        assert left_out == (point.verdict == "predicted_oom"), (cluster, point)
        fits = tab.js(f"{line}.classList.contains('w-yes')")
        assert fits == ((point.peak_bytes or 0) <= cluster["usable_bytes"])


def test_a_layout_against_the_rules_gets_their_sentence_and_no_bytes(tab: Browser) -> None:
    type_in(tab, "tp", 3)
    experiment = dataclasses.replace(spelled({}), tp=3)
    h200 = compose_sweep(["+grid=tiny", "cluster=h200"]).cluster
    expected = [broken.message for broken in violations(experiment, h200)]
    assert len(expected) > 2
    assert tab.js("[...document.querySelectorAll('#runs-m-rules li')].map(li => li.textContent)") == expected
    assert tab.text("#runs-m-total") == "no such layout"
    assert not tab.find("#runs-m-answer").is_displayed()
    type_in(tab, "tp", "")
    assert "must be a whole number" in tab.text("#runs-m-rules")
    type_in(tab, "tp", 1)
    assert total(tab) == estimate_memory(spelled({})).peak_bytes
    assert not tab.find("#runs-m-rules").is_displayed()


def test_a_shape_of_ones_own(tab: Browser) -> None:
    tab.click(".memory summary")
    for name, value in {"num_layers": 10, "hidden_size": 1000, "ffn_hidden_size": 3000}.items():
        type_in(tab, name, value)
    tab.click("#runs-m-moe")
    type_in(tab, "num_experts", 4)
    assert tab.js("document.querySelector('#runs-m-model').selectedOptions[0].textContent") == "custom, from llama8b"
    moe = MoESpec(num_experts=4, experts_per_token=2, expert_hidden_size=4096)
    base = spelled({})
    model = dataclasses.replace(base.model, num_layers=10, hidden_size=1000, ffn_hidden_size=3000, moe=moe)
    assert total(tab) == estimate_memory(base.replace(model=model)).peak_bytes
    assert tab.text("#runs-m-parameters") == f"{num_params(model) / 1e9:.4g} G parameters"
    type_in(tab, "num_experts", "")
    assert tab.text("#runs-m-rules") == "Experts: must be a whole number of at least 1"
    type_in(tab, "model", "llama8b")
    assert total(tab) == estimate_memory(base).peak_bytes


def test_keyboard_alone_moves_a_slider(tab: Browser) -> None:
    tab.js("document.querySelector('#runs-m-model').focus()")
    for _ in range(40):
        if tab.focused() == "runs-m-pp-slider":
            break
        tab.press(Keys.TAB)
    tab.press(Keys.ARROW_RIGHT)
    assert tab.js("document.querySelector('#runs-m-pp').value") == "2"
    assert total(tab) == estimate_memory(spelled({"pp": 2})).peak_bytes


@pytest.mark.parametrize("size", [(375, 812), (1400, 900)])
@pytest.mark.parametrize("dark", [False, True])
def test_memory_tab_fits_its_window_and_stays_quiet(
    browser: Browser, page: Path, size: tuple[int, int], dark: bool
) -> None:
    browser.open(page, size=size, dark=dark)
    opened(browser)
    assert browser.js("document.documentElement.scrollWidth") == size[0]
    unnamed = (
        "[...document.querySelectorAll('.memory :is(input, select)')].filter(i => !i.labels.length && !i.ariaLabel)"
    )
    assert browser.js(f"{unnamed}.length") == 0
    assert browser.console() == []
    assert browser.requests() == [page.resolve().as_uri()]


def test_tiles_are_as_wide_as_their_bytes(tab: Browser) -> None:
    type_in(tab, "recompute", "full")
    fullest = estimate_memory(spelled({"recompute": "full"})).stages[0]
    widths = dict(
        tab.js(
            "[...document.querySelectorAll('#runs-m-tiles .w-tiles')]"
            ".map(tile => [tile.dataset.category, tile.getBoundingClientRect().width])"
        )
    )
    known = {name: getattr(fullest, f"{name}_bytes") for name in CATEGORIES}
    assert set(widths) == {name for name, value in known.items() if value}
    for name, width in widths.items():
        assert width / sum(widths.values()) == pytest.approx(known[name] / fullest.peak_bytes, abs=0.01)


@pytest.mark.slow
def test_shapes_and_limits_are_those_that_the_planner_reads() -> None:
    given, folders = models_json(), ConfFolders()
    shipped = {name: folders.model(name) for name in folders.names("model")}
    by_numbers = {name: model for name, model in shipped.items() if model.layers is None}
    assert {shape.name: shape for shape in SHIPPED} == by_numbers
    assert {"gpt_oss_20b", "gemma_4_26b_a4b", "qwen_dense"} <= shipped.keys() - by_numbers.keys()  # by kinds of layers
    with_memory = [name for name in folders.names("cluster") if name != "cpu"]
    assert sorted(cluster["name"] for cluster in given["clusters"]) == with_memory
    for fields in given["clusters"]:
        config = compose_sweep(["+grid=tiny", f"cluster={fields['name']}"])
        assert given["oom_margin"] == config.plan.oom_margin
        assert fields["memory_bytes"] == config.cluster.device.memory_bytes
        assert fields["precisions"] == list(config.cluster.device.peak_flops)
        assert fields["device"] == config.cluster.device.name


def test_shapes_of_the_rows_can_be_chosen_too() -> None:
    own = dataclasses.replace(spelled({}).model, name="ours", ffn_hidden_size=9999)
    renamed = dataclasses.replace(spelled({}).model, name="llama8b again")
    clash = dataclasses.replace(own, name="llama8b", num_layers=5)
    rows = [
        synthetic.attempt(Experiment(model=model, global_batch_size=8))
        for model in (spelled({}).model, own, own, renamed, clash)
    ]
    rows.append({**rows[0], "num_layers": 77, "config_json": "{}"})
    offered = [fields["name"] for fields in models_json(frame_of(rows))["models"]]
    assert offered == [*(shape.name for shape in SHIPPED), "ours", "llama8b (of the rows)"]


@pytest.mark.parametrize("text", ["- a list", "{", "name: [unclosed"])
def test_a_shape_that_cannot_be_read_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "odd.yaml").write_text(text)
    with pytest.raises(InvalidSweep, match=r"odd\.yaml") as caught:
        models_json(conf=tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidSweep, match="holds no YAML file"):
        models_json(conf=tmp_path / "nowhere")
