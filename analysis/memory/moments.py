"""Memory of a rank over the first steps, by the closed form, after each operation.

Between two operations a rank of a pipeline stage holds (see `workloads.costs.memory.estimate` for the letters)

    parameters  g P / S, and for ZeRO 0, 1, 2 the copy to compute with, c P, from the first forward to the last backward
    gradients   after a step's first backward: r P until the last one where they accumulate unsharded, else g P / S;
                the optimizer frees them
    optimizer   its states of P / S parameters from the end of the first step on
    activations saved tensors of each micro-batch between its forward and its backward, and the token ids

The working memory of a running operation is included only in the peak of the step (`peak_of_step`), which is the
planner's estimate. In the first step that peak is either without the optimizer's state or that of the optimizer itself,
whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.memory.peak_split import categories
from workloads.costs.memory.activations import head_bytes, rank_tokens
from workloads.costs.memory.estimate import estimate_memory, parameter_shard_bytes, saved_bytes
from workloads.costs.memory.host import device_state_bytes
from workloads.costs.memory.sizes import accumulates_unsharded
from workloads.costs.shape.fp8 import gathered_bytes
from workloads.costs.shape.params import COMPUTE_BYTES, local_params
from workloads.costs.shape.partition import experiment_stages
from workloads.costs.shape.schedule import schedule_actions
from workloads.costs.shape.updates import shard_numbers
from workloads.spec.experiment import Experiment
from workloads.spec.updates.optimizer import master_bytes, reduced_bytes

STEPS = 4
SCHEDULES = ("none", "gpipe", "1f1b")
"""Schedules whose order of operations is known."""
_LENGTHS = {"F": 1.0, "B": 2.0}
"""Relative lengths of forward and backward, which computes twice as much; the optimizer is drawn as long as a
forward."""
Bytes = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory held at one moment between two operations, in bytes by category."""

    step: int
    at: float
    """Position in the step: 0 at its start, 1 at its end."""
    name: str
    bytes: Bytes


def moments(experiment: Experiment, stage: int, steps: int = STEPS, *, state_at_start: bool = False) -> list[Moment]:
    """Memory of a rank of a stage before, between and after the operations of the first steps. ``state_at_start``:
    the optimizer's state is there before the first step, as in runs whose later steps are captured."""
    e, x = experiment, _Held.of(experiment, stage)
    actions = schedule_actions(e.pp_schedule, stage, e.pp, e.num_microbatches)
    length = sum(_LENGTHS[action.kind] for action in actions) + _LENGTHS["F"]
    held_moments: list[Moment] = []
    for step in range(steps):
        optimizer = x.optimizer if step or state_at_start else 0
        now, in_flight, backwards = 0.0, 0, 0
        held_moments.append(Moment(step, 0.0, "start", (x.shard, 0, optimizer, x.inputs)))
        for action in actions:
            now += _LENGTHS[action.kind] / length
            in_flight += 1 if action.kind == "F" else -1
            backwards += action.kind == "B"
            last = backwards == e.num_microbatches
            gradients = 0 if not backwards else x.shard if last else x.accumulated
            held = (x.shard + (0 if last else x.copy), gradients, optimizer, x.inputs + in_flight * x.saved)
            kind = "forward" if action.kind == "F" else "backward"
            held_moments.append(Moment(step, now, f"{kind} {action.microbatch + 1}", held))
        held_moments.append(Moment(step, now, "optimizer's first look", (x.shard, x.shard, x.optimizer, x.inputs)))
        held_moments.append(Moment(step, 1.0, "optimizer", (x.shard, x.shard, x.optimizer, x.inputs)))
    return held_moments


def peak_of_step(experiment: Experiment, step: int) -> Bytes:
    """Peak of a step by category from the closed form, on the stage that holds most in this step."""
    stages = estimate_memory(experiment).stages
    if step:
        return max((categories(stage) for stage in stages), key=sum)
    running = [(p, g, 0, a) for p, g, _, a in map(categories, stages)]
    # AdamW allocates its moments when all gradients exist.
    shards = [(_Held.of(experiment, stage.stage).shard, stage.optimizer_bytes) for stage in stages]
    stepping = [(shard, shard, state, 0) for shard, state in shards]
    return max((*running, *stepping), key=sum)


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of one rank of a stage."""

    shard: int
    copy: int
    accumulated: int
    optimizer: int
    saved: int
    """Saved tensors of one micro-batch in flight."""
    inputs: int

    @classmethod
    def of(cls, e: Experiment, stage: int) -> _Held:
        held = experiment_stages(e)[stage]
        c, g = COMPUTE_BYTES[e.precision], master_bytes(e)
        layers, experts = local_params(e, held.layers)
        ends = (held.embedding + held.head) // e.tp + held.final_norm
        shard = parameter_shard_bytes(e, layers + ends, experts)
        tokens, stream_tokens = rank_tokens(e)
        saved = saved_bytes(e, stage)
        saved += head_bytes(e, c).saved if held.has_head else 0
        saved += c * stream_tokens * e.model.hidden_size if stage < e.pp - 1 else 0  # the output, which will be sent
        of_experts = gathered_bytes(e, c, of_experts=True) * experts
        everything = layers + experts + ends
        return cls(
            shard=shard,
            copy=0 if e.zero_stage == 3 else gathered_bytes(e, c) * layers + of_experts + c * ends,
            accumulated=reduced_bytes(e) * everything if accumulates_unsharded(e) else shard,
            optimizer=device_state_bytes(e, shard // g, *shard_numbers(e, held)),
            saved=saved,
            inputs=16 * tokens * e.num_microbatches + 4 * e.seq_len // e.cp * e.model.rope_dim,
        )
