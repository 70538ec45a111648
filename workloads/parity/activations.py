"""Records activations and their gradients on one rank, and assembles those of all ranks.

Recorded are tensors with the hidden size: the residual stream between blocks, and in each block the outputs of its
norms, of attention and of the feed-forward part. A rank has some sequences, some of their positions, and with sequence
parallelism some rows of these. With compiled blocks only the stream is recorded: a hook inside a block would change
what is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workloads.engine.collectives.parameters import named_parameters
from workloads.engine.layers.block import AnyBlock
from workloads.engine.layers.transformer import Chunk
from workloads.engine.training.build import Engine
from workloads.engine.training.data import held_tokens, sequences_of
from workloads.parity.shards import Whole, relative_difference
from workloads.spec.experiment import Experiment

PARTS = ("attention_norm", "attention", "ffn_norm", "ffn")
"""Modules of a block whose outputs are recorded, in the order of its forward."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's rows of one micro-batch of an activation or gradient."""

    name: str
    """``embedding``, ``layers.3.attention``, ``layers.3`` (the block's output), ``norm`` (the last one)."""
    microbatch: int
    position: dict[str, int]
    values: Tensor
    """[tokens of this rank, hidden size]"""


class Recorder:
    """Records one step at a time: `forward` and `backward` hold the tensors recorded since the last call of `take`."""

    def __init__(self, engine: Engine) -> None:
        self.position = engine.groups.position
        self.forward: dict[tuple[str, int, int], Piece] = {}
        self.backward: dict[tuple[str, int, int], Piece] = {}
        for index, chunk in enumerate(engine.chunks):
            order = [a.microbatch for a in engine.pipeline.actions if a.kind == "F" and a.chunk == index]
            _Watch(self, chunk, order, inside=engine.experiment.compile == "none")

    def take(self) -> tuple[list[Piece], list[Piece]]:
        """Remove and return the (activations, gradients of the residual stream) of the last step."""
        taken = list(self.forward.values()), list(self.backward.values())
        self.forward, self.backward = {}, {}
        return taken

    def note(self, name: str, stage: int, microbatch: int, x: Tensor, *, gradient: bool = False) -> None:
        """Keep a copy on the host. A tensor that is recomputed in a backward is kept from its first computation
        only."""
        kept = self.backward if gradient else self.forward
        if (name, stage, microbatch) not in kept:
            values = x.detach().reshape(-1, x.shape[-1]).cpu().clone()
            kept[name, stage, microbatch] = Piece(name, microbatch, self.position, values)


class _Watch:
    """Hooks on one chunk, which record for ``recorder``."""

    def __init__(self, recorder: Recorder, chunk: Chunk, order: list[int], *, inside: bool) -> None:
        self.recorder, self.stage = recorder, chunk.stage
        blocks = [module for wrapped in chunk.blocks for module in wrapped.modules() if isinstance(module, AnyBlock)]
        layers = [_layer_of(block) for block in blocks]
        self.names = [_stream(layer) for layer in (layers[0], *(layer + 1 for layer in layers))]
        self.order = order
        self.runs = self.marks = 0
        chunk.register_forward_pre_hook(self._begin)
        chunk.between_blocks = self._between
        if inside:
            for layer, block in zip(layers, blocks, strict=True):
                for part in (name for name in PARTS if getattr(block, name, None) is not None):
                    self._hook(getattr(block, part), f"layers.{layer}.{part}")
        if chunk.head is not None:
            self._hook(chunk.head.norm, "norm")

    @property
    def microbatch(self) -> int:
        step = self.order or [0]
        return step[(self.runs - 1) % len(step)]

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self.runs += 1
        self.marks = 0

    def _between(self, x: Tensor) -> Tensor:
        name, microbatch = self.names[self.marks], self.microbatch
        self.marks += 1
        self.recorder.note(name, self.stage, microbatch, x)
        if x.requires_grad:
            x.register_hook(partial(self._gradient, name, microbatch))
        return x

    def _gradient(self, name: str, microbatch: int, gradient: Tensor) -> None:
        self.recorder.note(name, self.stage, microbatch, gradient, gradient=True)

    def _hook(self, module: nn.Module, name: str) -> None:
        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.recorder.note(name, self.stage, self.microbatch, output)

        module.register_forward_hook(note)


def _layer_of(block: nn.Module) -> int:
    """Number of a block's layer, from the names of its weights."""
    name = next(named_parameters(block)).spec.parts[0].name
    return int(name.split(".")[1])


def _stream(layer: int) -> str:
    """Name of the residual stream before a layer."""
    return "embedding" if layer == 0 else f"layers.{layer - 1}"


def names_in_order(num_layers: int) -> Iterator[str]:
    """Names of all recorded tensors, in the order of the forward."""
    yield "embedding"
    for layer in range(num_layers):
        yield from (f"layers.{layer}.{part}" for part in PARTS)
        yield f"layers.{layer}"
    yield "norm"


def put_activations_together(experiment: Experiment, ranks: Sequence[Sequence[Piece]]) -> dict[str, Whole]:
    """Tensors [sequences of the global batch, positions, hidden size], by name, assembled from the pieces of all
    ranks."""
    e = experiment
    assembled: dict[str, Whole] = {}
    wholes: dict[str, Tensor] = {}
    spreads: dict[str, float] = {}
    for pieces in ranks:
        for piece in pieces:
            shape = (e.global_batch_size, e.seq_len, e.model.hidden_size)
            whole = wholes.setdefault(piece.name, torch.full(shape, torch.nan, dtype=piece.values.dtype))
            sequences, positions = _places(e, piece)
            # the layout cuts rows differently, so these rows have no known position
            if len(sequences) != len(piece.values):
                spreads[piece.name] = float("inf")
                continue
            there = whole[sequences, positions]
            if there.isnan().all():
                whole[sequences, positions] = piece.values
            else:
                spread = relative_difference(piece.values, there)
                spreads[piece.name] = max(spreads.get(piece.name, 0.0), spread)
    for name, whole in wholes.items():
        assembled[name] = Whole(whole, spreads.get(name, 0.0))
    return assembled


def _places(e: Experiment, piece: Piece) -> tuple[Tensor, Tensor]:
    """(sequence of the global batch, position in it) of every row of a piece."""
    at = piece.position
    data_rank = at["dp_replicate"] * e.dp_shard + at["dp_shard"]
    held = sequences_of(e, data_rank, piece.microbatch)
    of_row = torch.cat([held_tokens(e, index, at["cp"]) for index in held])
    sequence = torch.tensor(held).repeat_interleave(e.seq_len // e.cp)
    if e.tp > 1 and e.sequence_parallel:
        rank_rows = slice(at["tp"] * len(of_row) // e.tp, (at["tp"] + 1) * len(of_row) // e.tp)
        return sequence[rank_rows], of_row[rank_rows]
    return sequence, of_row


def microbatch_of(experiment: Experiment, sequence: int) -> int:
    """Index of the micro-batch in which a layout's data-parallel rank computes a sequence of the global batch."""
    e = experiment
    return next(
        microbatch
        for microbatch in range(e.num_microbatches)
        if any(sequence in sequences_of(e, rank, microbatch) for rank in range(e.dp))
    )


def differing(value: Tensor, expected: Tensor, tolerance: float) -> int | None:
    """First sequence of an activation that differs by more than ``tolerance`` of the largest element; None if all
    agree."""
    scale = expected.double().abs().max()
    errors = ((value.double() - expected.double()).abs() / scale).flatten(1).amax(1)
    wrong = [i for i, error in enumerate(errors.tolist()) if not error <= tolerance]
    return wrong[0] if wrong else None
