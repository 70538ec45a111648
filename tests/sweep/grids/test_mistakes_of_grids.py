"""Mistakes in grids: each is told in one line, and all of them at once."""

from __future__ import annotations

from typing import Any

import pytest

from sweep.grids.grid import grid_from_dict
from tests.sweep.grids.test_expand import grid
from workloads.spec.errors import InvalidSweep


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"axes": {"tpp": [1]}}, r"no axis is called 'tpp'; did you mean 'tp'\?"),
        ({"axes": {"recompte": ["none"]}}, r"did you mean 'recompute'\?"),
        # The expression that misses the axis does not suggest its misspelling.
        (
            {"axes": {"micro_batchsize": [1]}, "derive": {"dp": "8 / micro_batch_size"}},
            r"no axis is called 'micro_batchsize'; did you mean 'micro_batch_size'\?",
        ),
        ({"axes": {"tp": []}}, "axis tp is empty"),
        ({"axes": {"tp": [[1]]}}, r"axis tp=\[1\] must be a whole number of at least 1"),
        ({"axes": {"tp": [0]}}, "axis tp=0 must be a whole number of at least 1"),
        ({"axes": {"tp": [None]}}, "axis tp=None must be a whole number of at least 1"),
        ({"axes": {"tokens_per_step": ["x"]}}, "axis tokens_per_step='x' must be a whole number of at least 1"),
        ({"axes": {"seed": ["abc"]}}, "axis seed='abc' must be a whole number"),
        ({"axes": {"engine": "foo"}}, "axis engine='foo'; it may be ultrasweep"),
        ({"axes": {"engine": "ultra_sweep"}}, r"axis engine='ultra_sweep'; did you mean 'ultrasweep'\?"),
        ({"axes": {"engine_version": 1}}, "axis engine_version='1'; it may be 7"),
        ({"axes": {"sequence_parallel": ["maybe"]}}, "axis sequence_parallel='maybe'; it may be true or false"),
        ({"axes": {"zero_stage": ["abc"]}}, "axis zero_stage='abc'; it may be 0, 1, 2 or 3"),
        ({"axes": {"compile": [False]}}, "axis compile=False; it may be none or block"),
        (
            {"axes": {"recompute": None}},
            r"axis recompute=None; did you mean 'none'\? it may be auto, none",
        ),
        ({"axes": {"recompute": "ful"}}, r"axis recompute='ful'; did you mean 'full'\? it may be auto, none"),
        ({"zip": {"a": {"precision": ["bf61"], "tp": [1]}}}, r"axis precision='bf61'; did you mean 'bf16'\?"),
        ({"axes": {"tp": 2}, "derive": {"tp": "1"}}, r"tp is an axis and also derived.*~grid\.derive\.tp"),
        ({"axes": {"tp": 2}, "zip": {"a": {"tp": [1], "pp": [1]}}}, "tp is on more than one axis"),
        ({"zip": {"a": {"tp": [1, 2], "pp": [1]}}}, "different lengths: tp 2, pp 1"),
        ({"derive": {"dp": "8 / tp"}}, "derive.dp uses 'tp', which is no axis; add it to axes, or derive it"),
        ({"where": {"a": "tpp < 2"}}, r"where\.a uses 'tpp', which is no axis; did you mean 'tp'\?"),
        ({"where": {"a": "peak_byte < 2"}}, r"where\.a uses 'peak_byte', .*did you mean 'peak_bytes'\?"),
        (
            {"axes": {"nodes": [1]}, "where": {"a": "nodes * predicted_peak_bytes < 2"}},
            r"where\.a mixes the grid variable nodes with the point field predicted_peak_bytes; split it into two",
        ),
        ({"derive": {"accumlation": "global_batch_size"}}, "derive.accumlation is not used"),
        ({"derive": {"engine": "'foo'"}}, "engine cannot be derived; give it as an axis"),
        ({"derive": {"zero_stage": "7"}}, "derive.zero_stage=7; it may be 0, 1, 2 or 3"),
        ({"axis": {}}, r"no section 'axis'; did you mean 'axes'\?"),
        ({"subsample": {"count": 0}}, "subsample=.*at least 1"),
        ({"subsample": {"cout": 3}}, "subsample="),
        ({"axes": {"num_layers": 3}}, "num_layers is part of the model's shape"),
        ({"axes": {"tp": 2, "world_size": 4}}, "world_size=4, but .* has 2; derive the other degrees"),
        ({"axes": {"nodes": 1}, "derive": {"dp": "nodes / 'a'"}}, "derive.dp: unsupported operand"),
        (
            {"axes": {"tp": [1, 2]}, "where": {"none": "tp > 2"}},
            r"no point is left of 2 combinations; ruled out by where\.none: 2$",
        ),
        # Each branch counts for the combinations below it: tp 1 for three of pp.
        (
            {"axes": {"tp": [1, 2, 3], "pp": [1, 2, 4]}, "where": {"none": "tp > 1", "deep": "pp > 4"}},
            r"no point is left of 9 combinations; ruled out by where\.deep: 6, where\.none: 3$",
        ),
        (
            {"where": {"a": 'tp == "2"'}},
            r'where\.a: tp is a number and "2" is a text, .* equal; write 2 without quotes$',
        ),
        (
            {"where": {"a": "recompute in ['full', 1]"}},
            r"where\.a: recompute is a text and 1 is a number, .*; it may be ",
        ),
        (
            {"where": {"a": "engine_version == 7 or tp == 1"}},
            r'where\.a: engine_version is a text .* write "\d+"|may be',
        ),
        ({"where": {"a": "tp < 4 < recompute"}}, r"where\.a: 4 is a number and recompute is a text, .*; it may be "),
        (
            {"where": {"a": "sequence_parallel == 'true'"}},
            r"a: sequence_parallel is true or false .* write True without",
        ),
        ({"where": {"a": "step_time_s < '2'"}}, r'where\.a: step_time_s is a number and "2" is a text'),
        ({"where": {"a": "pp > 1 or 'fp8' == precision"}}, r"where\.a: precision='fp8'; did you mean 'fp8_blockwise'"),
        (
            {"axes": {"nodes": [1]}, "derive": {"dp": "half * 2", "half": "nodes / 2"}, "where": {"a": "half != '1'"}},
            r'where\.a: half is a number and "1" is a text',
        ),
        ({"axes": {"kind": ["a", "b"]}, "where": {"a": "kind == 1"}}, r'where\.a: kind is a text and 1 .* write "1"$'),
        (
            {"axes": {"n": [1]}, "derive": {"dp": "1 if n == 'a' else 2"}},
            r'derive\.dp: n is a number and "a" is a text',
        ),
        ({"where": {"a": "num_microbatches > 64"}}, r"no point is left of 1 combination; ruled out by where\.a: 1$"),
    ],
)
def test_mistakes_are_told_in_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSweep, match=message) as error:
        grid(**sections)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("grid g")


def test_all_mistakes_of_a_grid_are_reported_at_once() -> None:
    fields = {
        "global_batch_size": 64,
        "axes": {"model": "small", "tensor_parallel_degree": 2, "zero_stage": [0, 4], "spare": 1, "nodes": 1},
        "zip": {"pair": {"pp": [1, 2], "cp": [1]}},
        "derive": {"dp": "8 * nodes / tp", "seq_len": "1 +"},
        "where": {"small": "tpp < 2"},
    }
    with pytest.raises(InvalidSweep) as error:
        grid_from_dict("g", fields)
    assert [message.partition(" known:")[0] for message in error.value.messages] == [
        "grid g: no section 'global_batch_size'; it is an axis: write axes: {global_batch_size: 64}",
        "grid g: axis zero_stage=4; it may be 0, 1, 2 or 3",
        "grid g: zip.pair pairs lists of different lengths: pp 2, cp 1",
        "grid g: derive.seq_len: cannot read '1 +'; an example: world_size / (tp * pp)",
        "grid g: no axis is called 'tensor_parallel_degree'; did you mean 'tp'?",
        "grid g: no axis is called 'spare';",
        "grid g: where.small uses 'tpp', which is no axis; did you mean 'tp'?",
    ]
