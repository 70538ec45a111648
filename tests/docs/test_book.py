"""The shipped book as sequences of bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from docs.tools.curves import book as text
from tests.workloads.engine.parity import experiment
from workloads.engine.training.data import Source, step_batches
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment

CPU = torch.device("cpu")
README = Path(text.__file__).with_name("README.md")


def case(**layout: int) -> Experiment:
    """The parity tests' model, with a token for every byte."""
    plain = experiment(micro_batch_size=1, **layout)
    return plain.replace(model=dataclasses.replace(plain.model, vocab_size=256))


def whole_batch(e: Experiment, step: int, source: Source) -> list[Tensor]:
    """Every sequence of a global batch in its order, tokens and their targets."""
    rows: dict[int, Tensor] = {}
    for rank in range(e.dp):
        for number, batch in enumerate(step_batches(e, step, rank, CPU, source=source)):
            tokens, targets = (part.view(e.micro_batch_size, e.seq_len) for part in batch)
            for place in range(e.micro_batch_size):
                index = (number * e.dp + rank) * e.micro_batch_size + place
                rows[index] = torch.cat([tokens[place], targets[place, -1:]])
    return [rows[index] for index in sorted(rows)]


def test_the_book_is_the_one_that_is_described() -> None:
    written = bytes(text.book().to(torch.uint8).tolist())
    page = README.read_text()
    assert hashlib.sha256(written).hexdigest() in page
    assert f"{len(written):,} bytes" in page
    assert written.startswith(b"OPTICKS:") and b"Gutenberg" not in written


def test_the_parts_are_the_whole() -> None:
    assert torch.equal(torch.cat([text.training_part(), text.held_out_part()]), text.book())
    assert len(text.held_out_part()) == len(text.book()) // 10


@pytest.mark.parametrize("source", [text.training_text, text.held_out_text])
def test_every_layout_has_the_same_global_batch(source: Source) -> None:
    for step in (0, 3):
        alone, parallel = (whole_batch(case(dp=dp), step, source) for dp in (1, 2))
        assert len(alone) == len(parallel) == case().global_batch_size
        assert all(torch.equal(a, b) for a, b in zip(alone, parallel, strict=True))


def test_training_sequences_are_pieces_of_the_training_part_from_places_of_their_own() -> None:
    part = bytes(text.training_part().to(torch.uint8).tolist())
    pieces = [text.training_text(case(), step, index) for step in range(3) for index in range(4)]
    written = [bytes(piece.to(torch.uint8).tolist()) for piece in pieces]
    assert all(len(piece) == case().seq_len + 1 and piece in part for piece in written)
    assert len(set(written)) == len(written)
    assert not torch.equal(text.training_text(case().replace(seed=1), 0, 0), pieces[0])


def test_held_out_sequences_follow_one_another() -> None:
    e = case()
    steps = text.held_out_steps(e)
    assert 1 < steps <= text.MOST_HELD_OUT_STEPS
    rows = [text.held_out_text(e, step, index) for step in range(steps) for index in range(e.global_batch_size)]
    assert torch.equal(torch.cat([row[:-1] for row in rows]), text.held_out_part()[: steps * e.tokens_per_step])
    assert all(torch.equal(row[-1], after[0]) for row, after in pairwise(rows))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidExperiment, match="has vocab_size=64"):
        text.training_text(case().replace(model=dataclasses.replace(case().model, vocab_size=64)), 0, 0)
    with pytest.raises(InvalidExperiment, match="seq_len=600000 is more than the text has, 510135 bytes"):
        text.training_text(case().replace(seq_len=600_000), 0, 0)
    with pytest.raises(InvalidExperiment, match="take a smaller global_batch_size or seq_len"):
        text.held_out_steps(case().replace(seq_len=50_000))
