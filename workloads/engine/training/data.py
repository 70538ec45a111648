"""Makes batches, the same for every layout; by default of uniform random tokens.

Sequence ``i`` of step ``s`` depends on (seed, s, i) alone, for every `Source`. Data-parallel rank ``d`` takes sequences
``(microbatch * dp + d) * micro_batch_size ...`` of the global batch. Context-parallel ranks take different positions of
the same sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workloads.engine.collectives.context_parallel import local_positions
from workloads.spec.experiment import Experiment

Source = Callable[[Experiment, int, int], Tensor]
"""``(experiment, step, index)``: the ``seq_len + 1`` tokens of one sequence of the step's global batch."""


def step_batches(
    experiment: Experiment,
    step: int,
    data_rank: int,
    device: torch.device,
    cp_rank: int = 0,
    source: Source | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """(tokens_T, targets_T) of every micro-batch of one data- and context-parallel rank, on ``device``.

    T = B*S flattened, where S is the number of tokens of a sequence that the rank holds, in the order of
    `local_positions`. ``source``: None for synthetic tokens.
    """
    sequence = source or _sequence
    size, dp = experiment.micro_batch_size, experiment.dp
    positions = local_positions(experiment.seq_len, experiment.cp, cp_rank, experiment.cp_kind)
    batches = []
    for microbatch in range(experiment.num_microbatches):
        first = (microbatch * dp + data_rank) * size
        rows = torch.stack([sequence(experiment, step, first + i) for i in range(size)])
        tokens, targets = rows[:, :-1][:, positions], rows[:, 1:][:, positions]
        batches.append((tokens.reshape(-1).to(device), targets.reshape(-1).to(device)))
    return batches


def generator_of(experiment: Experiment, step: int, index: int) -> torch.Generator:
    """Random generator that belongs to one sequence."""
    # Seeds of neighbouring sequences may be close to each other: manual_seed scrambles its argument.
    seed = (experiment.seed * 1_000_003 + step) * 1_000_003 + index
    return torch.Generator().manual_seed(seed & (2**63 - 1))


def _sequence(experiment: Experiment, step: int, index: int) -> Tensor:
    generator = generator_of(experiment, step, index)
    return torch.randint(experiment.model.vocab_size, (experiment.seq_len + 1,), generator=generator)
