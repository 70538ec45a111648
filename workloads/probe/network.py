"""Times collectives over the ranks of a probe by size and group, and how much collectives and compute slow each other
down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from workloads.contract.probe_figures import MIB, Figure, Sizes
from workloads.engine.collectives.communication import Axis, all_to_all_async, gather_async, reduce_scatter_async, wait
from workloads.engine.training.clock import Mark
from workloads.probe.device_rates import Beat, rate
from workloads.probe.stopwatch import Stopwatch

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_ONE_WAY = "send"
"""Timed between nodes, too: pipelines send one way at a time."""
_WITH_RESULT = {"all_gather": gather_async, "reduce_scatter": reduce_scatter_async, "all_to_all": all_to_all_async}
"""Collectives that the engine starts and later waits for; each allocates its result, as in a step."""
_BESIDE_BYTES = 128 * MIB
_BESIDE = ("all_gather", "reduce_scatter", "all_reduce")


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A process group that contains this rank."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    placement: str


def make_placed(world_size: int, per_node: int, rank: int, *, across_only: bool = False) -> list[Placed]:
    """Makes groups of 2, 4, ... devices of a node, groups of one device per node, and one of all ranks; collective over
    all ranks. Returns the groups that contain ``rank``. ``across_only``: only groups that span several nodes."""
    own_groups: list[Placed] = []

    def add(members: list[list[int]], placement: str) -> None:
        for ranks in members:
            group = dist.new_group(ranks)
            if rank in ranks:
                own_groups.append(Placed(group, tuple(ranks), placement))

    node = min(per_node, world_size)
    inside = [n for n in range(2, node + 1) if node % n == 0 and (n == node or n & (n - 1) == 0)]
    for size in [] if across_only else inside:
        add([list(range(start, start + size)) for start in range(0, world_size, size)], "inside_node")
    if world_size > node:
        add([list(range(local, world_size, node)) for local in range(node)], "between_nodes")
        if node > 1:
            add([list(range(world_size))], "mixed")
    return own_groups


def collective_figures(watch: Stopwatch, placed: list[Placed], sizes: Sizes, beat: Beat, rank: int) -> Iterator[Figure]:
    """Seconds of each operation by size. All groups of one size run at the same time; only rank 0, in the first of
    them, yields figures."""
    for one in placed:
        inside, between = one.placement == "inside_node", one.placement == "between_nodes"
        for op in (*_OPS, _ONE_WAY) if between else _OPS:
            for size in sizes.collective_bytes if inside else sizes.network_bytes:
                beat()
                call = collective(op, size, one, watch.device)
                timed = watch.time(call, 0.0, repeats=_repeats(size, watch.device))
                if one.ranks[0] == 0 and rank == 0:
                    yield timed.figure("collective", op, bytes=size, group_size=len(one.ranks), placement=one.placement)


def collective(op: str, size: int, placed: Placed, device: torch.device) -> Callable[[], object]:
    """Returns a call of ``op`` over whole buffers of ``size`` bytes, in bf16."""
    count = len(placed.ranks)
    elements = max(count, size // 2 // count * count)
    make = partial(torch.zeros, dtype=torch.bfloat16, device=device)
    at = placed.ranks.index(dist.get_rank())
    group, axis = placed.group, Axis("probe", count, at, placed.group)
    if op == "all_reduce":
        return partial(dist.all_reduce, make(elements), group=group)
    if op in _WITH_RESULT:
        x, start = make(elements // count if op == "all_gather" else elements), _WITH_RESULT[op]
        return lambda: wait(start(x, axis))
    # Send to the next rank of the group and receive from the previous one; one way: from even ranks to odd ones.
    to, origin = placed.ranks[(at + 1) % count], placed.ranks[(at - 1) % count]
    sends, receives = (at % 2 == 0 and at + 1 < count, at % 2 == 1) if op == _ONE_WAY else (True, True)
    messages = [dist.P2POp(dist.isend, make(elements), to, group)] * sends
    messages += [dist.P2POp(dist.irecv, make(elements), origin, group)] * receives

    def exchange() -> None:
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()

    return exchange


def _repeats(size: int, device: torch.device) -> int:
    return max(10, min(50, 2**30 // size)) if device.type == "cuda" else 5


def interference_figures(watch: Stopwatch, placed: Placed, beat: Beat, rank: int) -> Iterator[Figure]:
    """Slowdown factors of a matrix product during a collective, and of a collective during matrix products.

    The other operation runs until the timed one has ended. Yields nothing on a CPU, which has no streams.
    """
    if watch.device.type != "cuda":
        return
    x, w = (torch.randn(8192, 4096, device=watch.device, dtype=torch.bfloat16) for _ in range(2))
    product = partial(torch.matmul, x, w.t())
    side: Any = torch.cuda.Stream(watch.device)  # type: ignore[no-untyped-call]
    fields: dict[str, Any] = {"bytes": _BESIDE_BYTES, "group_size": len(placed.ranks), "placement": placed.placement}
    for op in _BESIDE:
        beat()
        call = collective(op, _BESIDE_BYTES, placed, watch.device)
        matmul = watch.time(product, 0.0, repeats=100)
        alone = watch.time(call, 0.0, repeats=50)
        # All ranks need the same counts; otherwise one would wait for a call that another never makes.
        longest = torch.tensor([matmul.seconds, alone.seconds], device=watch.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=placed.group)
        matmul_s, alone_s = longest.tolist()
        collectives = int(min(500, max(20, 0.3 / alone_s)))
        products = int(min(2000, max(20, 0.3 / matmul_s)))
        compute = _beside(watch, side, product, products, call, 2 * collectives)
        network = _beside(watch, side, call, collectives, product, 2 * products, swap=True)
        state = watch.state()
        if rank == 0:
            yield Figure(
                kind="interference",
                name="compute",
                value=compute / matmul.seconds,
                unit="x",
                beside=op,
                **state,
                **fields,
            )
            yield Figure(
                kind="interference",
                name=op,
                value=network / alone.seconds,
                unit="x",
                beside="matmul",
                **state,
                **fields,
            )


def _beside(
    watch: Stopwatch,
    side: Any,
    timed: Callable[[], object],
    count: int,
    other: Callable[[], object],
    others: int,
    *,
    swap: bool = False,
) -> float:
    """Seconds of one ``timed`` call while ``other`` runs on the other stream. ``swap``: run ``timed`` on ``side``."""
    dist.barrier()
    watch.clock.finish()
    main = torch.cuda.current_stream(watch.device)
    first, second = (side, main) if swap else (main, side)
    marks: list[Mark] = []
    # The host launches on both streams in turn, so that both have work from the start.
    done = 0
    for index in range(count):
        with torch.cuda.stream(second):
            while done < others and done <= (index + 2) * others // count:
                other()
                done += 1
        with torch.cuda.stream(first):
            if index == count // 10 or index == count // 2:
                marks.append(watch.clock.mark())
            timed()
    watch.clock.finish()
    return watch.clock.seconds(marks[0], marks[1]) / (count // 2 - count // 10)


def check_figures(watch: Stopwatch, placed: list[Placed], sizes: Sizes) -> Iterator[Figure]:
    """Figures of the node check at the start of a pilot, on this rank: rates of matmul, copy and all-reduce."""
    side = sizes.check_matmul
    x, w = (torch.randn(side, side, device=watch.device, dtype=torch.bfloat16) for _ in range(2))
    timed = watch.time(partial(torch.matmul, x, w), 4 * sizes.seconds)
    yield rate(timed.figure("check", "matmul", rows=side, columns=side, inner=side), 2.0 * side**3, "FLOP/s")
    a, b = (torch.zeros(sizes.check_bytes, dtype=torch.uint8, device=watch.device) for _ in range(2))
    moved = 2 * sizes.check_bytes
    yield rate(watch.time(partial(a.copy_, b), sizes.seconds).figure("check", "copy", bytes=moved), moved, "B/s")
    of_node = [one for one in placed if one.placement == "inside_node"]
    between = [one for one in placed if one.placement == "between_nodes"]
    for name, largest_groups in (("all_reduce_inside_node", of_node[-1:]), ("all_reduce_between_nodes", between[-1:])):
        for one in largest_groups:
            call = collective("all_reduce", sizes.check_bytes, one, watch.device)
            timed = watch.time(call, 0.0, repeats=20)
            count = len(one.ranks)
            figure = timed.figure("check", name, bytes=sizes.check_bytes, group_size=count, placement=one.placement)
            yield rate(figure, 2.0 * (count - 1) / count * sizes.check_bytes, "B/s")
