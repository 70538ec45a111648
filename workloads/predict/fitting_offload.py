"""The activations that a layout must have on the host to fit a limit of memory, beside a given recomputation.

Words of ``activation_offload`` add up: their bytes on the link, and the bytes that the host holds, are sums over the
words. What the device is spared is at most what the host holds, so a set of words whose bytes are fewer than what lacks
is not tried:

    peak(words) >= peak(none) - held(words)

Of the rest the set with the fewest bytes on the link comes first. Copies wait longer for more bytes, so the first that
fits is also the fastest. No torch here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from workloads.costs.memory.estimate import peak_stage
from workloads.costs.memory.host_activations import most_held, node_host_bytes, offloaded_of_chunks
from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.partition import ranks_alike
from workloads.costs.time.offload_times import rounds_of, seconds_of_layers, slowed_of, waiting_s
from workloads.costs.traffic.collectives import Contention
from workloads.predict.points import Floats
from workloads.spec.activations.offload import ALL, WORDS, may_name
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.recomputation import is_by_stage

_IN_TURN = 12
"""Sets of words that are tried one after another, before those in between are halved."""


_Sizes = dict[int, list[tuple[int, ...]]]
"""`offloaded_of_chunks` by pipeline rank."""


class Offloads(NamedTuple):
    """Sets of words that a layout with one recomputation may offload, those with the fewest bytes on the link first."""

    texts: tuple[str, ...]
    link_bytes: Floats
    """Bytes that cross the link in one step, as `workloads.costs.memory.host_activations.link_bytes`."""
    waits_s: Floats
    """Seconds that a step waits for copies, as `workloads.costs.time.offload_times.added_by_offload`."""
    held: Floats
    """Bytes on the host of each pipeline rank, of shape (sets, ranks); of several chunks a bound from above."""


class Offloaded(NamedTuple):
    """What was found for one recomputation."""

    text: str
    peak_bytes: int
    """Bytes of tensors on the fullest device."""
    waits_s: float


def offloads_of(experiment: Experiment, cluster: ClusterSpec, known: dict[Hashable, _Sizes] | None = None) -> Offloads:
    """The sets of words beside the experiment's recomputation; none where no layer offloads anything. The rates of the
    device and of the link must be known. ``known``: sizes of the layout's tensors, which this adds to; other
    recomputation of all layers has the same tensors, apart from ``full``."""
    e = as_held(experiment)
    alike = ranks_alike(e)
    first = {kind: alike.index(kind) for kind in alike}
    named = [word for word in WORDS if may_name(word, e.recompute)]
    by_stage = is_by_stage(e.recompute)
    known = {} if known is None else known
    sizes: dict[str, _Sizes] = {}
    for word in [*named, *([ALL] if by_stage else [])]:
        key = word, e.recompute if by_stage or e.recompute == "full" else ""
        if key not in known:
            known[key] = _sizes(e, word, list(first.values()))
        sizes[word] = known[key]
    named = [word for word in named if _bytes_of(sizes[word])]
    sets = [chosen for chosen in product((0, 1), repeat=len(named)) if any(chosen)]
    texts = [_text(named, chosen, by_stage=by_stage) for chosen in sets]
    columns = list(named)
    if by_stage and _bytes_of(sizes[ALL]):  # each stage offloads what it keeps, which no names say
        sets = [*((*chosen, 0) for chosen in sets), (*(0 for _ in named), 1)]
        texts.append(ALL)
        columns.append(ALL)
    if not sets:
        return Offloads((), np.zeros(0), np.zeros(0), np.zeros((0, e.pp)))
    chosen = np.array(sets, dtype=float)
    held = np.array(
        [
            [most_held(e, rank, [sum(layers) for layers in sizes[word][first[alike[rank]]]]) for rank in range(e.pp)]
            for word in columns
        ],
        dtype=float,
    )
    sent = np.array([[sum(map(sum, sizes[word][rank])) for rank in first.values()] for word in columns], dtype=float)
    link = 2 * e.num_microbatches * (chosen @ sent).max(axis=1)
    waits = _waits_s(e, cluster, chosen, [sizes[word] for word in columns])
    order = np.lexsort((waits, link))
    return Offloads(tuple(texts[at] for at in order), link[order], waits[order], (chosen @ held)[order])


def _text(named: list[str], chosen: tuple[int, ...], *, by_stage: bool) -> str:
    if all(chosen) and not by_stage:
        return ALL
    return "+".join(word for word, is_in in zip(named, chosen, strict=True) if is_in)


def _sizes(e: Experiment, offload: str, ranks: list[int]) -> _Sizes:
    of_word = e.replace(activation_offload=offload)
    return {rank: offloaded_of_chunks(of_word, rank) for rank in ranks}


def _bytes_of(sizes: _Sizes) -> int:
    return sum(sum(layers) for chunks in sizes.values() for layers in chunks)


def _waits_s(e: Experiment, cluster: ClusterSpec, chosen: Floats, sizes: list[_Sizes]) -> Floats:
    """`workloads.costs.time.offload_times.added_by_offload` of each set. ``chosen``: of shape (sets, words)."""
    seconds, link = seconds_of_layers(e, cluster), cluster.host.one_way_bandwidth
    assert seconds is not None and link is not None  # else there is nothing to compare
    longest, slower = np.zeros(len(chosen)), slowed_of(e, cluster)
    for rank in sizes[0]:
        waits = np.zeros(len(chosen))
        for chunk, layers in enumerate(seconds[rank]):
            copies = chosen @ np.array([of_word[rank][chunk] for of_word in sizes], dtype=float) / link
            forward, backward, gather, reduce, *slowed = np.array(layers).T
            beside = Contention(*slowed)
            waits += waiting_s(copies, forward, gather, beside, slower, np.maximum).sum(axis=1)
            waits += waiting_s(copies, backward, gather + reduce, beside, slower, np.maximum)[:, 1:].sum(axis=1)
            waits += np.maximum(0.0, copies[:, 0] - gather[0])
        longest = np.maximum(longest, waits)
    return rounds_of(e) * longest


@dataclass(slots=True)
class FittingOffload:
    """Finds what layouts must offload on one cluster."""

    cluster: ClusterSpec

    def least(self, experiment: Experiment, offloads: Offloads, limit_bytes: int) -> Offloaded | None:
        """The set with the fewest bytes on the link with which every device has at most ``limit_bytes`` of tensors, and
        a node what its host must hold; None if there is none. ``offloads``: those of the experiment."""
        if not offloads.texts:
            return None
        e = experiment.replace(activation_offload="none")
        peaks: dict[int, int] = {}

        def fits(at: int) -> bool:
            if at not in peaks:
                peaks[at] = peak_stage(e.replace(activation_offload=offloads.texts[at])).peak_bytes
            return peaks[at] <= limit_bytes

        fullest = peak_stage(e)
        worth = fullest.peak_bytes - offloads.held[:, fullest.stage] <= limit_bytes
        places = np.flatnonzero(worth).tolist()
        if not places or not fits(places[-1]):
            return None
        found = next((at for at in places[:_IN_TURN] if fits(at)), None)
        if found is None:
            low, high = _IN_TURN, len(places) - 1
            while low < high:  # more bytes on the host are fewer on the device, but for what works at the peak
                middle = (low + high) // 2
                low, high = (low, middle) if fits(places[middle]) else (middle + 1, high)
            found = places[high]
        text = offloads.texts[found]
        if not self.host_holds(e.replace(activation_offload=text)):
            return None
        return Offloaded(text, peaks[found], float(offloads.waits_s[found]))

    def host_holds(self, experiment: Experiment) -> bool:
        """Whether a node has the memory; True if that of the cluster's nodes is not known."""
        limit = self.cluster.host.memory_bytes
        return limit is None or node_host_bytes(experiment, self.cluster.devices_per_node) <= limit
