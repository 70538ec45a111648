"""Times two real layers and a head of the engine on one rank alone under a fake process group, and their launch
overhead.

Groups are as in a rehearsal: data of other ranks is replaced by copies of this rank's numbers, and the time of these
copies is subtracted. Marks are set around the blocks and where gradients pass between them:

    forward   ─ embedding ─ a ─ blocks ─ b ─ head ─      backward   ─ head ─ c ─ blocks ─ d ─ embedding ─
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from workloads.contract.probe_figures import Figure, Sizes
from workloads.engine.collectives.groups import make_groups
from workloads.engine.observing.stand_ins import StandIns
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.engine.training.clock import Mark
from workloads.measuring import host_pace
from workloads.measuring.step import garbage_collector_off, run_steps
from workloads.probe.device_rates import DEGREES, Beat
from workloads.probe.stopwatch import Stopwatch
from workloads.rules.layout_rules import lacking, layout_violations
from workloads.spec.experiment import Experiment

_LAYERS, _HOST_LAYERS = 2, 4
_RECOMPUTE = ("none", "selective", "full")
_WARM = 3
_MOST_STEPS = 60
_NAMES = ("head_forward", "layers_forward", "head_backward", "layers_backward", "optimizer", "step")


@dataclass
class _Marks:
    """Device marks and host times of all steps, for each of the four places a to d where a tensor passes."""

    device: dict[str, list[Mark]] = field(default_factory=lambda: {place: [] for place in "abcd"})
    host: dict[str, list[float]] = field(default_factory=lambda: {place: [] for place in "abcd"})

    def clear(self) -> None:
        for place in "abcd":
            self.device[place].clear()
            self.host[place].clear()


def layer_cases(task_experiment: Experiment, sizes: Sizes) -> list[Experiment]:
    """Experiments with two layers, for every combination of tp, micro-batch size and recomputation."""
    return _valid(
        task_experiment,
        [
            {"tp": tp, "micro_batch_size": mbs, "recompute": recompute}
            for tp in DEGREES
            for mbs in sizes.micro_batches
            for recompute in _RECOMPUTE
        ],
        sizes.seq_len,
        _LAYERS,
    )


def host_cases(task_experiment: Experiment, sizes: Sizes) -> list[Experiment]:
    """Experiments with a few short layers, for every combination of tp, ZeRO 0 or 3, and recomputation."""
    return _valid(
        task_experiment,
        [
            {"tp": tp, "dp": dp, "zero_stage": 3 if dp > 1 else 0, "recompute": recompute, "micro_batch_size": 1}
            for tp in (1, 2)
            for dp in (1, 2)
            for recompute in _RECOMPUTE
        ],
        sizes.short_seq_len,
        _HOST_LAYERS,
        sizes.host_rounds,
    )


def _valid(
    of: Experiment, layouts: list[dict[str, Any]], seq_len: int, layers: int, rounds: int = 1
) -> list[Experiment]:
    valid = []
    for layout in layouts:
        case = Experiment.canonical(
            model=replace(of.model, num_layers=layers),
            seq_len=seq_len,
            precision=of.precision,
            global_batch_size=rounds * layout["micro_batch_size"] * layout.get("dp", 1),
            cuda_graph="none",  # the host's time is measured, too
            **layout,
        )
        if not layout_violations(case) and not lacking(case):
            valid.append(case)
    return valid


def layer_figures(watch: Stopwatch, cases: list[Experiment], sizes: Sizes, beat: Beat) -> Iterator[Figure]:
    """Device seconds of layers, head, optimizer and step of each case; a case that does not fit in memory yields
    nothing."""
    for case in cases:
        beat()
        yield from _alone(watch, case, sizes.layer_seconds, on_host=False)


def host_figures(watch: Stopwatch, cases: list[Experiment], sizes: Sizes, beat: Beat) -> Iterator[Figure]:
    """Host seconds to launch one layer, forward and backward."""
    for case in cases:
        beat()
        yield from _alone(watch, case, sizes.layer_seconds / 2, on_host=True)


def launch_figures(moments: Iterable[float | None]) -> Iterator[Figure]:
    """Host seconds to launch one small operation (`workloads.measuring.host_pace`), median over several moments,
    because a host is a tenth faster or slower from one moment to the next. ``moments``: one value per moment; None on a
    CPU."""
    if launch_times := [seconds for seconds in moments if seconds is not None]:
        yield _figure("host", "launch", launch_times, {"repeats": len(launch_times) * host_pace.ROUNDS})


def lower_of(figures: Iterable[Figure]) -> list[Figure]:
    """The lowest value of each test of the host, over repetitions at several times: other work on the machine can only
    make it slower."""
    lowest: dict[tuple[object, ...], Figure] = {}
    for one in figures:
        test = (one.name, one.tp, one.dp, one.zero_stage, one.recompute)
        lowest[test] = min(one, lowest.get(test, one), key=lambda figure: figure.value)
    return list(lowest.values())


def _alone(watch: Stopwatch, case: Experiment, at_least_s: float, *, on_host: bool) -> list[Figure]:
    figures = _in_fake_group(watch, case, at_least_s, on_host=on_host)
    gc.collect()  # the engine and its hooks are a reference cycle
    if watch.device.type == "cuda":
        torch.cuda.empty_cache()
    return figures


def _in_fake_group(watch: Stopwatch, case: Experiment, at_least_s: float, *, on_host: bool) -> list[Figure]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
    try:
        choose_attention(case)
        engine = build(case, make_groups(case, 0, watch.device))
        return _measured(watch, engine, at_least_s, on_host=on_host)
    except torch.OutOfMemoryError:
        return []
    finally:
        dist.destroy_process_group()


def _measured(watch: Stopwatch, engine: Engine, at_least_s: float, *, on_host: bool) -> list[Figure]:
    marks = _Marks()
    _set_marks(engine, marks)
    copies = StandIns(engine)
    warm = run_steps(engine, range(_WARM), lambda step, warm: None, is_warmup=True, counter=copies)
    once = watch.clock.seconds(warm[-1].start, warm[-1].end)
    count = int(min(_MOST_STEPS, max(3, at_least_s / max(once, 1e-4))))
    # Untimed steps, as many as are timed, so that power and clocks settle.
    run_steps(engine, range(_WARM, _WARM + count), lambda step, warm: None, is_warmup=True)
    marks.clear()
    states: list[dict[str, Any]] = []

    def look(step: int, is_warmup: bool) -> None:
        if step == _WARM + count + count // 2:
            states.append(watch.state())

    first = _WARM + count
    with garbage_collector_off():
        timed = run_steps(engine, range(first, first + count), look, is_warmup=False)
    case, state = engine.experiment, states[0]
    known = {
        "tp": case.tp,
        "dp": case.dp,
        "zero_stage": case.zero_stage,
        "micro_batch_size": case.micro_batch_size,
        "seq_len": case.seq_len,
        "recompute": case.recompute,
        "num_layers": case.model.num_layers,
        "repeats": count,
        **state,
    }
    if on_host:
        return [
            _figure("host", name, [(y - x) / case.model.num_layers for x, y in spans], known)
            for name, spans in (
                ("layer_forward", zip(marks.host["a"], marks.host["b"], strict=True)),
                ("layer_backward", zip(marks.host["c"], marks.host["d"], strict=True)),
            )
        ]
    since = watch.clock.seconds
    times: dict[str, list[float]] = {name: [] for name in _NAMES}
    for index, pending in enumerate(timed):
        assert pending.launched is not None, "these steps are not captured"
        a, b, c, d = (marks.device[place][index] for place in "abcd")
        forward, backward = (
            next(span for span in pending.launched.marks.actions if span[0].kind == kind) for kind in ("F", "B")
        )
        times["head_forward"].append(since(b, forward[2]))
        times["layers_forward"].append(since(a, b))
        times["head_backward"].append(since(backward[1], c))
        times["layers_backward"].append(since(c, d))
        times["optimizer"].append(since(pending.launched.reduced, pending.end))
        times["step"].append(since(pending.start, pending.end))
    off = _shares(copies.seconds() or (0.0, 0.0), case.model.num_layers)
    return [
        _figure("layer", name, [value - off.get(name, 0.0) for value in values], known)
        for name, values in times.items()
    ]


def _shares(copies: tuple[float, float], layers: int) -> dict[str, float]:
    """Seconds of the copies in each part. A layer has two gathers and two sums in each direction; embedding and head
    have one of each together, of which the head has half."""
    of_layers = 2 * layers / (2 * layers + 1)
    shares = {}
    for name, seconds in zip(("forward", "backward"), copies, strict=True):
        shares[f"layers_{name}"] = seconds * of_layers
        shares[f"head_{name}"] = seconds * (1 - of_layers) / 2
    return shares


def _figure(kind: str, name: str, values: list[float], known: dict[str, Any]) -> Figure:
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) / mean if len(values) > 1 and mean > 0 else None
    return Figure(kind=kind, name=name, value=statistics.median(values), unit="s", spread=spread, **known)


def _set_marks(engine: Engine, marks: _Marks) -> None:
    clock = engine.clock

    def mark(place: str) -> None:
        marks.device[place].append(clock.mark())
        marks.host[place].append(time.perf_counter())

    def passes(x: Any, forward: str, backward: str) -> None:
        mark(forward)
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda gradient: mark(backward))  # type: ignore[no-untyped-call]

    # The hooks run before FSDP's own hooks: gathering the first block's weights, in forward or backward, counts as time
    # of the layers.
    blocks = engine.chunks[0].blocks
    blocks[0].register_forward_pre_hook(lambda module, inputs: passes(inputs[0], "a", "d"), prepend=True)
    blocks[-1].register_forward_hook(lambda module, inputs, output: passes(output, "b", "c"), prepend=True)
