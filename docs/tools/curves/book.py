"""Sequences of real text: the shipped book (`docs/tools/curves/README.md`), one token per byte.

The first nine tenths are the training part, read from random positions; the last tenth is held out and read in order.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from workloads.engine.training.data import generator_of
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment

BYTES = 256
_HELD_OUT = 10
"""One part in this many is held out."""
MOST_HELD_OUT_STEPS = 16
"""Largest number of global batches of held-out text in a loss: small batches would make it take long."""


@cache
def book() -> Tensor:
    """The whole text as int64 [bytes]."""
    packed = Path(__file__).with_name("opticks.txt.gz").read_bytes()
    return torch.frombuffer(bytearray(gzip.decompress(packed)), dtype=torch.uint8).long()


def training_part() -> Tensor:
    """Bytes that are trained on."""
    return book()[: -(len(book()) // _HELD_OUT)]


def held_out_part() -> Tensor:
    """Bytes that are held out."""
    return book()[-(len(book()) // _HELD_OUT) :]


def training_text(experiment: Experiment, step: int, index: int) -> Tensor:
    """Training sequence at a random position that depends on the sequence. A
    `workloads.engine.training.data.Source`."""
    part = _checked(experiment, training_part())
    places = len(part) - experiment.seq_len
    start = int(torch.randint(places, (), generator=generator_of(experiment, step, index)))
    return part[start : start + experiment.seq_len + 1]


def held_out_steps(experiment: Experiment) -> int:
    """Number of global batches in the held-out loss: all that fit in the held-out part, up to `MOST_HELD_OUT_STEPS`.

    Raises `InvalidExperiment` if not even one fits.
    """
    steps = (len(held_out_part()) - 1) // experiment.tokens_per_step
    if steps == 0:
        raise InvalidExperiment(
            f"a global batch of {experiment.tokens_per_step} tokens is more than the held-out text has "
            f"({len(held_out_part())}); take a smaller global_batch_size or seq_len"
        )
    return min(steps, MOST_HELD_OUT_STEPS)


def held_out_text(experiment: Experiment, step: int, index: int) -> Tensor:
    """Sequence of the held-out part, read in order up to `held_out_steps`. A
    `workloads.engine.training.data.Source`."""
    part = _checked(experiment, held_out_part())
    start = (step * experiment.global_batch_size + index) * experiment.seq_len
    return part[start : start + experiment.seq_len + 1]


def _checked(experiment: Experiment, part: Tensor) -> Tensor:
    model = experiment.model
    if model.vocab_size < BYTES:
        raise InvalidExperiment(f"text has {BYTES} tokens, one a byte; {model.name} has vocab_size={model.vocab_size}")
    if experiment.seq_len >= len(part):
        raise InvalidExperiment(f"seq_len={experiment.seq_len} is more than the text has, {len(part)} bytes")
    return part
