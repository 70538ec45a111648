"""Which layouts exchange the tokens of tensor-parallel ranks through memory that the ranks share
(`workloads.engine.collectives.peer_memory`), and how much memory that is. No torch here."""

from __future__ import annotations

from workloads.costs.shape.fp8 import is_low
from workloads.costs.shape.params import COMPUTE_BYTES
from workloads.spec.experiment import ENGINE, Experiment

SLOTS = 2
"""Slots that exchanges use in turn."""
_ALIGNED = 512
WITHOUT_SHARED_MEMORY = ("1", "2", "3", "4")
"""Versions of this engine that left every exchange to NCCL."""


def shares_memory(experiment: Experiment) -> bool:
    """Whether a layout's ranks share memory: with sequence parallelism, in eager layers, unless products are below 16
    bits, which cast all rows with one scale."""
    e = experiment
    able = e.engine == ENGINE and e.engine_version not in WITHOUT_SHARED_MEMORY and not is_low(e)
    compiled = e.compiles(routed=False, recomputed=e.recompute != "none" and e.recompute_every == 1)
    return able and e.tp > 1 and e.sequence_parallel and not compiled


def slot_bytes(experiment: Experiment) -> int:
    """Bytes of one slot, 0 if the ranks share no memory: ``c (tp - 1) T/tp h`` for the T tokens of a micro-batch on a
    rank, h their width (or that of wider latents) and c bytes a number."""
    e = experiment
    if not shares_memory(e):
        return 0
    widths = [e.model.hidden_size]
    if e.model.mla is not None:
        widths += [e.model.mla.q_lora_rank or 0, e.model.mla.kv_lora_rank]
    rows = e.micro_batch_size * e.seq_len // e.cp // e.tp
    size = COMPUTE_BYTES[e.precision] * (e.tp - 1) * rows * max(widths)
    return -(-size // _ALIGNED) * _ALIGNED
