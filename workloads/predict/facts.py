"""What the profiles of code bases say about each row, as arrays that the closed form reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workloads.predict.points import Floats, Points
from workloads.predict.profiles import FORM_SPREAD, Profile
from workloads.predict.stages import Stages, stages_of

ADDED_IN_PRODUCTS = 0.3
"""Time of gradient accumulation in products that add to the sums, over that of casts and additions by themselves: 0.2
of 0.7 ms a layer at 4,096 tokens on H200."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of each row from the profiles, and its stages: everything that a fit does not change."""

    stages: Stages
    gradient_bytes: Floats
    """Bytes per value when gradients are reduced and accumulated."""
    added: Floats
    """Time of gradient accumulation over that of the code base's usual way."""
    optimizer_bytes: Floats
    """Bytes that the optimizer reads and writes per parameter."""
    once_bytes: Floats
    """Of these, what stages move one after another (`Profile`)."""
    sequence_parallel: Floats
    unfused: Floats
    """1: attention writes its scores to memory."""
    stops_early: Floats
    """1: full recomputation ends before the down projection, whose result backward does not need."""
    runs_ahead: Floats
    """1: the host launches the work after a pipeline message before the message has arrived."""
    form_spread: Floats
    """The profile's inside a node, else `FORM_SPREAD`."""
    host_doubt: Floats
    host_noise: Floats
    """``host_doubt``, ``host_noise``: as in `Profile`."""
    slow_host: Floats
    slow_messages: Floats
    keeps_gathers: Floats
    """1: gathered inputs of tensor-parallel products stay for the backward, and take memory. The two of ten collectives
    that this spares are not left out of times: the study's rows fit no better without them."""
    autocasts: Floats
    """1: weights are in fp32, and every product casts its operands."""
    compiled: Floats
    """1: a compiler has fused the small operations of layers and of the loss."""
    captured: Floats
    """1: forward and backward are a CUDA graph, which no host launches."""
    overlaps_messages: Floats
    """1: bytes of pipeline messages travel beside the compute of other chunks."""
    bucket: Floats
    fitted_ring: Floats
    """``bucket``, ``fitted_ring``: as in `Profile`."""
    gathers: Floats
    """1: weights are gathered, and gradients reduced, in every micro-batch of ZeRO 3; 0: once a step."""
    fp8_hidden: Floats
    fp8_ffn: Floats
    """Values of 2 bytes that a layer in fp8 keeps less (`Profile`); 0 for rows in 16 bits."""


def facts_of(points: Points, profiles: Mapping[str, Profile]) -> Facts:
    names = [str(name) for name in points.codebase]
    of_rows = [profiles[name] for name in names]

    def array(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=float)

    limit = array([np.nan if one.slow_host_below is None else one.slow_host_below for one in of_rows])
    with np.errstate(invalid="ignore"):
        slow_host = (points.intra_measured < limit).astype(float)
    graphs = array([one.captures == "block" for one in of_rows])
    dense = array([one.captures == "dense" for one in of_rows]) * (points.routed == 0)
    unpipelined = array([one.captures == "unpipelined" for one in of_rows])
    versions = [(one, str(version)) for one, version in zip(of_rows, points.version, strict=True)]
    slow = [one.has_slow_messages(version) for one, version in versions]
    keeps = [one.keeps_gathers(version) for one, version in versions]
    return Facts(
        stages=stages_of(points, {name: profile.partition for name, profile in profiles.items()}),
        gradient_bytes=array([one.gradient_bytes for one in of_rows]),
        added=ADDED_IN_PRODUCTS ** np.nan_to_num(points.adds - array([one.adds for one in of_rows])),
        optimizer_bytes=array([one.optimizer_bytes for one in of_rows]),
        once_bytes=array([one.once_bytes for one in of_rows]),
        sequence_parallel=np.where(
            np.isfinite(points.split), points.split, array([one.sequence_parallel for one in of_rows])
        ),
        unfused=np.where(
            np.isfinite(points.unfused), points.unfused, array([one.attention == "unfused" for one in of_rows])
        ),
        stops_early=array([one.recompute_stops_early for one in of_rows]),
        runs_ahead=array([one.host_runs_ahead for one in of_rows]),
        form_spread=np.where(points.gpus > points.node, FORM_SPREAD, array([one.form_spread for one in of_rows])),
        host_doubt=array([one.host_doubt for one in of_rows]),
        host_noise=array([one.host_noise for one in of_rows]),
        slow_host=slow_host,
        slow_messages=array(slow),
        keeps_gathers=array(keeps),
        autocasts=array([one.autocasts for one in of_rows]) * (points.zero == 0),
        compiled=points.compiled * (1 - graphs),
        captured=np.maximum(points.captured, points.compiled * graphs + dense + unpipelined * (points.pp == 1)),
        overlaps_messages=array([one.overlaps_messages for one in of_rows]) * (points.vpp > 1),
        bucket=array([one.bucket for one in of_rows]),
        fitted_ring=array([one.fitted_ring for one in of_rows]),
        gathers=(points.zero == 3) * (1 - array([one.gathers_once for one in of_rows]) * (points.routed > 0)),
        fp8_hidden=array([one.fp8_hidden for one in of_rows]) * (points.fp8 > 0),
        fp8_ffn=array([one.fp8_ffn for one in of_rows]) * (points.fp8 > 0),
    )
