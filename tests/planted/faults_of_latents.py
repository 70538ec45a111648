"""Faults of latent attention: what is rotated, normed, shared and made again."""

from __future__ import annotations

from tests.planted.faults import ENGINE, OPTIMIZER, TP, TP_ONLY, faults_of

_LATENT = ENGINE + "layers.latent_attention:"
_FORWARD = _LATENT + "LatentAttention.forward"
_ONE = {"latent": 16, "micro_batch_size": 4}
_SHARED = "key_BS1R.expand(-1, -1, k_BSNP.shape[2], -1)"
_LATENT_AND_KEY = "kv_latent_TC.square().sum(1, keepdim=True) + key_TR.square().sum(1, keepdim=True)"
_AGAIN = {**_ONE, "recompute": "selective+mla_up"}
LATENTS = faults_of(
    "mla",
    (
        "rope_on_first_numbers",
        "the first numbers of a query are rotated, of a key the last",
        _LATENT + "LatentAttention._rotate",
        "q_BSNP, q_BSNR = q_BSNQ.split([self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim], dim=3)",
        "q_BSNR, q_BSNP = q_BSNQ.split([self.shape.qk_rope_head_dim, self.shape.qk_nope_head_dim], dim=3)",
        _ONE,
    ),
    (
        "positions_left_out",
        "latent attention has no positions, as in Kimi Linear",
        _LATENT + "LatentAttention._rotate",
        "if not self.rotated:",
        "if self.rotated:",
        _ONE,
    ),
    (
        "queries_without_the_shared_part",
        "layers without positions have no part that all heads share",
        _FORWARD,
        "k_BSNQ = _with_shared(k_BSNP, key_BS1R)",
        "k_BSNQ = _with_shared(k_BSNP, key_BS1R * float(self.rotated))",
        {"layers": "kimi_linear", "seq_len": 84, "micro_batch_size": 4},
    ),
    (
        "angles_of_whole_heads",
        "angles are those of heads as large as queries",
        ENGINE + "layers.transformer:Chunk._fill_rope",
        "2 * pair / rotated.columns",
        "2 * pair / 10",
        _ONE,
    ),
    (
        "shared_key_of_first_head",
        "the gradient of the shared key is that of the first head",
        _LATENT + "_with_shared",
        _SHARED,
        "torch.cat([key_BS1R, key_BS1R.detach().expand(-1, -1, k_BSNP.shape[2] - 1, -1)], dim=2)",
        _ONE,
    ),
    (
        "shared_key_of_own_heads",
        "the gradient of the shared key is not summed over tensor-parallel ranks",
        _FORWARD,
        "gather_tokens(key_TR, self.tp)",
        "key_TR",
        {**TP_ONLY, "latent": 16},
    ),
    (
        "normed_with_the_key",
        "the latent is normed together with the shared key",
        _FORWARD,
        "self.kv_norm(_one_head(kv_latent_TC)).view_as(kv_latent_TC)",
        "self.kv_norm(_one_head(kv_latent_TC)).view_as(kv_latent_TC) * "
        f"(kv_latent_TC.square().sum(1, keepdim=True) / ({_LATENT_AND_KEY})).sqrt()",
        _ONE,
    ),
    (
        "scale_of_values",
        "scores are scaled by the size of values",
        ENGINE + "ops.attention:attention",
        "wide, is_causal=causal, enable_gqa=grouped)",
        "wide, is_causal=causal, enable_gqa=grouped, scale=v_BKTV.shape[-1] ** -0.5)",
        _ONE,
    ),
    (
        "padding_kept",
        "padded values are taken for the last numbers of the output",
        ENGINE + "ops.attention:attention",
        "o[..., : v_BKTV.shape[-1]]",
        "o[..., -v_BKTV.shape[-1] :]",
        _ONE,
    ),
    (
        "down_projection_not_summed",
        "with sequence parallelism only gradients of norms are summed",
        OPTIMIZER + "ShardedOptimizer.finish_gradients",
        "if p.spec.placement.summed_over(",
        "if p.gradient.dim() == 1 and p.spec.placement.summed_over(",
        {**TP, "latent": 0},
    ),
    (
        "queries_again_not_rotated",
        "queries that are made again are not rotated",
        _LATENT + "LatentAttention._recompute_queries",
        "(self._rotate(q_BSNQ, a_key_BS1R, cos_SR, sin_SR)[0],)",
        "(q_BSNQ.contiguous(),)",
        _AGAIN,
    ),
    (
        "latents_again_not_normed",
        "keys and values are made again of latents as they were projected",
        _LATENT + "LatentAttention._recompute_up",
        "_normed(latent_TC, self.kv_norm)",
        "latent_TC.contiguous()",
        _AGAIN,
    ),
    (
        "shared_key_again_of_neighbour",
        "keys that are made again have the shared part of the token before",
        _LATENT + "LatentAttention._recompute_up_and_keys",
        "key_BS1R)",
        "key_BS1R.roll(1, 1))",
        _AGAIN,
    ),
    (
        "values_cut_in_the_message",
        "context-parallel ranks take the end of a key for the begin of a value",
        ENGINE + "collectives.context_parallel:_unpack",
        "kv_BKSX[..., :size], kv_BKSX[..., size:]",
        "kv_BKSX[..., :size], kv_BKSX[..., size - 1 : -1]",
        {"cp": 2, "cp_kind": "ring", "micro_batch_size": 4, "latent": 16},
    ),
)
