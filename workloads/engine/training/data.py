"""Makes batches, the same for every layout; by default of uniform random tokens.

Sequence ``i`` of step ``s`` depends on (seed, s, i) alone, for every `Source`. Data-parallel rank ``d`` takes sequences
``(microbatch * dp + d) * micro_batch_size ...`` of the global batch, or those dealt to it
(`workloads.spec.documents.loads`). Context-parallel ranks take different tokens of the same sequences.

With packed documents (`workloads.spec.documents.lengths`) a batch also has the place of each token in its document, and
with context parallelism what attention must know of the other ranks' tokens (`Batch`). The
last token of a document, one that is cut at the sequence's end too, predicts `END_OF_DOCUMENT` and nothing of the next
document. So every token has a target, and the loss is the mean over all tokens, as without documents.

For models with modules of multi-token prediction a batch also has the targets of each module. They are the targets of
the module before it, or of the model, one token later in the sequence, or in the document, whose last tokens have none
(arXiv:2412.19437, equation 24, where the loss is divided by all tokens). The next module takes their embeddings, so no
rank needs tokens of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workloads.engine.collectives.context_parallel import local_positions
from workloads.spec.documents.lengths import packed
from workloads.spec.documents.loads import dealt
from workloads.spec.documents.shares import shares
from workloads.spec.experiment import Experiment

Batch = tuple[Tensor, ...]
"""(tokens, targets) of a micro-batch, each [T]. With packed documents (tokens, targets, places in documents), and with
context parallelism one more part for each of its ranks, in their order: with Ulysses the places of that rank's tokens
in their documents, otherwise their indices in their sequences. The last parts are the targets of modules of multi-token
prediction, in their order (`NO_TARGET`: none)."""
NO_TARGET = -1
END_OF_DOCUMENT = 0
"""The token that a document's last one predicts."""
Source = Callable[[Experiment, int, int], Tensor]
"""``(experiment, step, index)``: the ``seq_len + 1`` tokens of one sequence of the step's global batch."""


def step_batches(
    experiment: Experiment,
    step: int,
    data_rank: int,
    device: torch.device,
    cp_rank: int = 0,
    source: Source | None = None,
) -> list[Batch]:
    """The `Batch` of every micro-batch of one data- and context-parallel rank, on ``device``.

    T = B*S flattened, where S is the number of tokens of a sequence that the rank holds, in the order of `held_tokens`.
    ``source``: None for synthetic tokens.
    """
    sequence = source or _sequence
    batches = []
    for microbatch in range(experiment.num_microbatches):
        chosen = sequences_of(experiment, data_rank, microbatch)
        rows = torch.stack([sequence(experiment, step, at) for at in chosen])
        held = [torch.stack([held_tokens(experiment, at, rank) for at in chosen]) for rank in range(experiment.cp)]
        parts = [rows[:, :-1], rows[:, 1:]]
        others: list[Tensor] = []
        places = None
        if experiment.documents is not None:
            places = torch.stack([_places(experiment, at) for at in chosen])
            parts = [parts[0], _within_documents(parts[1], places), places]
            if experiment.cp > 1:
                others = [places.gather(1, of_rank) for of_rank in held] if experiment.cp_kind == "ulysses" else held
        own = [part.gather(1, held[cp_rank]) for part in parts]
        later = [
            part.gather(1, held[cp_rank]) for part in _later_targets(parts[1], experiment.model.mtp_modules, places)
        ]
        batches.append(tuple(part.reshape(-1).to(device) for part in [*own, *others, *later]))
    return batches


def parts_of_batch(experiment: Experiment) -> int:
    """Number of tensors of a `Batch`."""
    modules = experiment.model.mtp_modules
    if experiment.documents is None:
        return 2 + modules
    return 3 + (experiment.cp if experiment.cp > 1 else 0) + modules


def held_tokens(experiment: Experiment, index: int, cp_rank: int) -> Tensor:
    """Indices in a sequence of the tokens that a context-parallel rank holds, in the order in which it holds them:
    int64 [S]. ``index``: of the sequence in the global batch. Without documents they are those of `local_positions`."""
    packing = experiment.packing
    if packing is None or packing.cp == 1:
        return local_positions(experiment.seq_len, experiment.cp, cp_rank, experiment.cp_kind)
    lengths = packed(packing.documents, packing.seq_len, packing.global_batch_size)[index]
    size, chunks = shares(lengths, packing.cp, packing.balance)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks[cp_rank]])


def sequences_of(experiment: Experiment, data_rank: int, microbatch: int) -> Sequence[int]:
    """Sequences of the global batch in a micro-batch of one data-parallel rank."""
    if (packing := experiment.packing) is not None:
        return dealt(packing)[data_rank][microbatch]
    size = experiment.micro_batch_size
    first = (microbatch * experiment.dp + data_rank) * size
    return range(first, first + size)


def _places(experiment: Experiment, index: int) -> Tensor:
    """Place of each token of a sequence in its document: int64 [seq_len]."""
    assert experiment.documents is not None
    lengths = packed(experiment.documents, experiment.seq_len, experiment.global_batch_size)[index]
    return torch.cat([torch.arange(length) for length in lengths])


def _within_documents(targets: Tensor, places: Tensor) -> Tensor:
    """Targets of which none is of the next document."""
    return targets.masked_fill(_are_last(places), END_OF_DOCUMENT)


def _are_last(places: Tensor) -> Tensor:
    """Whether each token is the last one of its document: the token after it has place 0."""
    return torch.cat([places[:, 1:], torch.zeros_like(places[:, :1])], 1) == 0


def _later_targets(targets: Tensor, modules: int, places: Tensor | None) -> list[Tensor]:
    """Targets of each module of multi-token prediction, int64 [B, seq_len]. ``places``: of tokens in packed documents,
    whose last tokens have none as those of a sequence do."""
    later: list[Tensor] = []
    for _ in range(modules):
        before = later[-1] if later else targets
        moved = torch.full_like(before, NO_TARGET)
        moved[:, :-1] = before[:, 1:]
        later.append(moved if places is None else moved.masked_fill(_are_last(places), NO_TARGET))
    return later


def generator_of(experiment: Experiment, step: int, index: int) -> torch.Generator:
    """Random generator that belongs to one sequence."""
    # Seeds of neighbouring sequences may be close to each other: manual_seed scrambles its argument.
    seed = (experiment.seed * 1_000_003 + step) * 1_000_003 + index
    return torch.Generator().manual_seed(seed & (2**63 - 1))


def _sequence(experiment: Experiment, step: int, index: int) -> Tensor:
    generator = generator_of(experiment, step, index)
    return torch.randint(experiment.model.vocab_size, (experiment.seq_len + 1,), generator=generator)
