"""Faults of context parallelism: which positions a rank holds, and how attention over all of them is put together."""

from __future__ import annotations

from tests.planted.faults import BATCHES, CONTEXT, ENGINE, GATHER, RING, ULYSSES, faults_of

_JOIN = CONTEXT + "_Output.join"
_BOTH = "both = torch.logaddexp(lse, lse_BNS)"
_PLACED = "local_positions(*self.placed)"
POSITIONS = faults_of(
    "cp",
    (
        "rope_of_first_rank",
        "every rank rotates by the first one's positions",
        ENGINE + "layers.transformer:Chunk._fill_rope",
        _PLACED,
        "local_positions(*self.placed[:2], 0, self.placed[3])",
        RING,
    ),
    (
        "rope_in_order",
        "zig-zag tokens are rotated as if they followed each other",
        ENGINE + "layers.transformer:Chunk._fill_rope",
        _PLACED,
        "local_positions(*self.placed[:3], 'ulysses')",
        GATHER,
    ),
    (
        "targets_shifted_in_shard",
        "targets are shifted within a rank's tokens",
        BATCHES,
        "own = [part.gather(1, held[cp_rank]) for part in parts]",
        "own = [parts[0].gather(1, held[cp_rank]).roll(-at, 1) for at in range(2)]",
        RING,
    ),
    (
        "no_zigzag",
        "the parts of a sequence are dealt out in order",
        CONTEXT + "parts_of",
        "(rank, 2 * cp - 1 - rank)",
        "(2 * rank, 2 * rank + 1)",
        RING,
    ),
    (
        "zigzag_for_ulysses",
        "whole sequences are put together from zig-zag parts",
        CONTEXT + "parts_of",
        'if kind == "ulysses"',
        "if False",
        ULYSSES,
    ),
    (
        "heads_dealt_round_robin",
        "Ulysses deals out query heads one by one, apart from their keys",
        ENGINE + "collectives.ulysses:ulysses_attention",
        "unflatten(2, (cp.size, -1)).movedim(2, 0)",
        "unflatten(2, (-1, cp.size)).movedim(3, 0)",
        ULYSSES,
    ),
    (
        "heads_come_back_mixed",
        "Ulysses puts heads back in another order",
        ENGINE + "collectives.ulysses:ulysses_attention",
        "o_RSBNH.permute(2, 1, 0, 3, 4)",
        "o_RSBNH.permute(2, 1, 3, 0, 4)",
        ULYSSES,
    ),
)

_KINDS = (("ring", "_Ring", RING), ("allgather", "_AllGather", GATHER))
ATTENTION = [
    fault
    for kind, function, layout in _KINDS
    for fault in faults_of(
        "cp",
        (
            f"{kind}_block_dropped",
            "the first block of other keys is dropped",
            CONTEXT + f"{function}.forward",
            "output.join(first, o, lse)",
            "len(kept) > 1 and output.join(first, o, lse)",
            layout,
        ),
        (
            f"{kind}_merged_by_halves",
            "outputs of blocks are averaged",
            _JOIN,
            _BOTH,
            "lse_BNS = lse.clone(); both = lse + 0.6931471805599453",
            layout,
        ),
        (
            f"{kind}_sum_forgotten",
            "the log-sum-exp of joined blocks is that of the first",
            _JOIN,
            "lse.copy_(both)",
            "pass",
            layout,
        ),
        (
            f"{kind}_own_dq",
            "query gradients of other keys are dropped",
            CONTEXT + f"{function}.backward",
            "dq[:, :, first:] += parts[0]",
            "pass",
            layout,
        ),
        (
            f"{kind}_causal_forgotten",
            "queries see later tokens of their own rank",
            CONTEXT + "_own_tokens",
            "attention_forward(q, k, v, causal=True)",
            "attention_forward(q, k, v, causal=False)",
            layout,
        ),
    )
] + faults_of(
    "cp",
    (
        "ring_own_dkdv",
        "key gradients of other queries do not come home",
        CONTEXT + "_Ring.backward",
        "(others_dk + dk).to(k.dtype), (others_dv + dv).to(v.dtype)",
        "dk.to(k.dtype), dv.to(v.dtype)",
        RING,
    ),
    (
        "allgather_own_dkdv",
        "key gradients of other queries do not come home",
        CONTEXT + "_AllGather.backward",
        "rows.copy_(_pack(*parts[1:]).view(rows.shape))",
        "rows.zero_()",
        GATHER,
    ),
    (
        "ring_other_way",
        "keys go round the other way",
        "workloads.engine.collectives.communication:rotate_async",
        "to[(axis.rank + 1) % axis.size] = origin[(axis.rank - 1) % axis.size]",
        "to[(axis.rank - 1) % axis.size] = origin[(axis.rank + 1) % axis.size]",
        RING,
    ),
    (
        "ring_mask_off_by_one",
        "the rank just before is taken for one after",
        CONTEXT + "_seen",
        "step <= cp.rank",
        "step < cp.rank",
        RING,
    ),
)
