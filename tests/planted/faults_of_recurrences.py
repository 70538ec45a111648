"""Faults of recurrent layers: states between chunks and segments, decays, convolutions, gates and norms."""

from __future__ import annotations

from tests.planted.faults import ENGINE, faults_of
from tests.planted.plant import Fault

_SEGMENTS, _MAMBA = ENGINE + "kind_ops.segments:", ENGINE + "kind_ops.mamba_scan:MambaStep."
_DELTA, _STEPS = ENGINE + "kind_ops.delta_rule:", ENGINE + "kind_ops.delta_steps:"
_OF_MAMBA = {"layers": "mamba", "seq_len": 84, "micro_batch_size": 2}
_OF_DELTA = {"layers": "gated_delta", "seq_len": 84, "micro_batch_size": 2}
_OF_KIMI = {"layers": "kimi_delta", "seq_len": 84, "micro_batch_size": 2}
_EXCHANGE, _SHARES = ENGINE + "collectives.head_exchange:", ENGINE + "kind_ops.head_shares:ShareOfHeads."
_EXCHANGED = {"cp": 2, "cp_kind": "ring", "seq_len": 84, "micro_batch_size": 4}
_SEVERAL = {"layers": "mamba", "seq_len": 84, "global_batch_size": 8, "micro_batch_size": 8}
"""Sequences in two segments."""

RECURRENCES: list[Fault] = faults_of(
    "recurrent",
    (
        "state_lost_between_chunks",
        "every chunk of Mamba-2 begins without a state",
        _MAMBA + "_scan",
        "before.append(state)",
        "before.append(torch.zeros_like(state))",
        _OF_MAMBA,
    ),
    (
        "state_not_decayed",
        "the state before a chunk does not decay within it",
        _MAMBA + "_scan",
        "from_state * sums.exp().unsqueeze(5)",
        "from_state",
        _OF_MAMBA,
    ),
    (
        "gate_after_the_norm",
        "the output of Mamba-2 is gated after its norm",
        _MAMBA + "__call__",
        "self._normed(y * F.silu(z)) * norm",
        "self._normed(y) * F.silu(z) * norm",
        _OF_MAMBA,
    ),
    (
        "norm_over_all_groups",
        "all groups are normed together",
        _MAMBA + "_normed",
        "(self.groups, -1)",
        "(1, -1)",
        _OF_MAMBA,
    ),
    (
        "delta_state_lost_between_chunks",
        "every chunk of the delta rule begins without a state",
        _DELTA + "delta_rule",
        "before.append(state)",
        "before.append(torch.zeros_like(state))",
        _OF_DELTA,
    ),
    (
        "known_not_taken_off",
        "a chunk writes values without what the state before it holds of them",
        _DELTA + "delta_rule",
        "alone[:, at] - of_state[:, at] @ state",
        "alone[:, at]",
        _OF_DELTA,
    ),
    (
        "rates_of_other_tokens",
        "the triangular system has the rates of the tokens before",
        _DELTA + "delta_rule",
        "(of_keys * rate).tril(-1)",
        "(of_keys * rate.transpose(3, 4)).tril(-1)",
        _OF_DELTA,
    ),
    (
        "gate_and_values_exchanged",
        "gate and normed values change places",
        _STEPS + "GatedDeltaStep.__call__",
        "normed(o, norm, self.eps).flatten(2) * F.silu(gate)",
        "F.silu(normed(o, norm, self.eps).flatten(2)) * gate",
        _OF_DELTA,
    ),
    (
        "values_of_other_keys",
        "heads of values take the keys of other heads",
        _STEPS + "GatedDeltaStep.__call__",
        ".repeat_interleave(shared, 2)",
        ".repeat(1, 1, shared, 1)",
        _OF_DELTA,
    ),
    (
        "block_of_own_tokens_alone",
        "tokens of KDA see no earlier block of their chunk",
        _DELTA + "_scores_by_channel",
        "[earlier.unflatten(",
        "[0 * earlier.unflatten(",
        _OF_KIMI,
    ),
    (
        "decay_of_the_block_lost",
        "what KDA has of earlier blocks does not decay in the block itself",
        _DELTA + "_scores_by_channel",
        "(sums_n[:, :, :, at] - start).exp()",
        "(sums_n[:, :, :, at] * 0).exp()",
        _OF_KIMI,
    ),
    (
        "gate_by_silu",
        "the gate of KDA is a SiLU",
        _STEPS + "KimiDeltaStep.__call__",
        "gate.sigmoid()",
        "F.silu(gate)",
        _OF_KIMI,
    ),
    (
        "part_without_its_norm",
        "a layer of a mixer alone has no norm",
        ENGINE + "layers.block:MixerBlock.forward",
        "self.attention(self.attention_norm(x_TD), cos_SH, sin_SH, seen)",
        "self.attention(x_TD + 0 * self.attention_norm(x_TD), cos_SH, sin_SH, seen)",
        {"layers": "one_part", "seq_len": 84, "micro_batch_size": 2},
    ),
    (
        "state_lost_between_segments",
        "every segment begins without a state",
        _SEGMENTS + "_Scanned.forward",
        "parameters, state)",
        "parameters, step.start(first[:, :1]))",
        _SEVERAL,
    ),
    (
        "gradient_of_the_state_lost",
        "a segment gets no gradient through the state after it",
        _SEGMENTS + "_backward",
        "d_state = gradients[len(inputs) :]",
        "pass",
        _SEVERAL,
    ),
    (
        "convolution_sees_zeros",
        "the convolution of a segment sees nothing of the one before it",
        _SEGMENTS + "convolved",
        "torch.cat([tail_BKC, x_BLC], 1)",
        "torch.cat([torch.zeros_like(tail_BKC), x_BLC], 1)",
        _SEVERAL,
    ),
    (
        "kernel_turned_round",
        "the convolution's kernel is applied from its other end",
        _SEGMENTS + "convolved",
        "weight_CK[:, at]",
        "weight_CK[:, kernel - at]",
        _OF_MAMBA,
    ),
    (
        "tokens_not_put_in_order",
        "a recurrence of exchanged heads sees tokens in the order of the ranks",
        _EXCHANGE + "_order",
        "parts_of(axis.size, rank, kind)",
        "(2 * rank, 2 * rank + 1)",
        {"layers": "mamba", **_EXCHANGED},
    ),
    (
        "outputs_not_put_back",
        "outputs of exchanged heads return in the order of the sequence",
        _EXCHANGE + "_by_rank",
        "x_BPhC[:, part]",
        "x_BPhC[:, held]",
        {"layers": "gated_delta", **_EXCHANGED},
    ),
    (
        "halves_of_other_ranks",
        "each rank gets the heads of another one",
        _EXCHANGE + "_by_heads",
        "permute(2, 1, 0, 3)",
        "permute(2, 1, 0, 3).flip(0)",
        {"layers": "kimi_delta", **_EXCHANGED},
    ),
    (
        "columns_exchanged_as_one",
        "all inputs of a recurrence are cut as one: ranks get gates for keys",
        _EXCHANGE + "exchanged_recurrence",
        "columns(step)",
        "[[sum(one)] for one in columns(step)]",
        {"layers": "mamba", **_EXCHANGED},
    ),
    (
        "parameters_of_the_first_heads",
        "every rank takes the decays and convolutions of the first rank's heads",
        _SHARES + "own",
        "[self.rank]",
        "[0]",
        {"layers": "gated_delta", **_EXCHANGED},
    ),
    (
        "gradient_of_heads_twice",
        "gradients of decays and convolutions count each rank's heads twice",
        _SHARES + "own",
        "parameter.split(rows)",
        "(2 * parameter - parameter.detach()).split(rows)",
        {"layers": "mamba", **_EXCHANGED},
    ),
)
