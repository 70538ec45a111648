"""Faults of what Gemma 2, 3 and 4 have: norms beside experts, values made of keys, scaled scores, caps of logits."""

from __future__ import annotations

from tests.planted.faults import ENGINE, LOGITS, faults_of
from tests.planted.plant import Fault

_BESIDE = ENGINE + "layers.normed_experts:NormedExperts.forward"
_ROUTED, _CHUNK = ENGINE + "layers.block:_routed", ENGINE + "layers.transformer:Chunk."
_ATTENTION, _ROUTER = ENGINE + "layers.kind_attention:KindAttention.", ENGINE + "layers.routing:Router.forward"
_GEMMA4, _GEMMA3 = ({"layers": name, "micro_batch_size": 2} for name in ("dense_beside_experts", "scaled_scores"))
_LEARNED = {**_GEMMA4, "dp": 2, "ep": 2, "routing": "learned"}

GEMMA: list[Fault] = faults_of(
    "kinds",
    (
        "embeddings_not_scaled",
        "the scale of the embeddings is forgotten",
        _CHUNK + "_scaled",
        "x * self.embedding_scale",
        "x",
        _GEMMA3,
    ),
    (
        "norm_of_experts_left_out",
        "outputs of experts are added without their norm",
        _BESIDE,
        "self.experts_out_norm(out)",
        "(out + 0 * self.experts_out_norm(out))",
        _GEMMA4,
    ),
    (
        "dense_part_counts_twice",
        "the output of the dense MLP beside experts is added twice",
        _BESIDE,
        "self.shared_out_norm(shared_out) +",
        "2 * self.shared_out_norm(shared_out) +",
        _GEMMA4,
    ),
    (
        "dense_norm_for_experts",
        "experts get what the norm of the dense MLP's input gives",
        _BESIDE,
        "self.experts_norm(stream_TD)",
        "(x_TD + 0 * self.experts_norm(stream_TD))",
        _GEMMA4,
    ),
    (
        "router_input_not_divided",
        "the root of the hidden size does not divide what the router scores",
        _ROUTED,
        "model.hidden_size**-0.5",
        "1.0",
        _GEMMA4,
    ),
    (
        "scales_of_the_first_experts",
        "a copy's weight gets the scale of its place, not of its expert",
        _ROUTER,
        "[choice_Tk]",
        "[: choice_Tk.shape[1]]",
        _LEARNED,
    ),
    (
        "rotated_values",
        "values that are made of keys are the rotated ones",
        _ATTENTION + "forward",
        "v_BSKV = self._plain_norm(v_BSKV)",
        "v_BSKV = k_BSKH if self.mixer.shared_kv else self._plain_norm(v_BSKV)",
        _GEMMA4,
    ),
    (
        "values_not_normed_again",
        "what is recomputed of values has no norm",
        _ATTENTION + "forward",
        "lambda: (self._plain_norm(plain_v),)",
        "lambda: (plain_v.contiguous(),)",
        {**_GEMMA4, "recompute": "rope"},
    ),
    (
        "every_pair_turns",
        "all pairs of a head turn where the first of them should",
        _CHUNK + "_fill_rope",
        "* (pair < rotated.turning)",
        "",
        _GEMMA4,
    ),
    (
        "scores_by_the_size_of_heads",
        "scores are divided by the root of the size of a head in every model",
        _ATTENTION + "__init__",
        "mixer.score_scale * math.sqrt(mixer.head_dim) if",
        "1.0 if",
        _GEMMA3,
    ),
    (
        "loss_before_the_cap",
        "the loss is that of logits before their cap",
        LOGITS + "_statistics",
        "_capped(logits[rows].to(statistics.dtype), logits.dtype, cap)",
        "logits[rows].to(statistics.dtype)",
        _GEMMA4,
    ),
    (
        "cap_without_slope",
        "the gradient of logits forgets their cap",
        LOGITS + "logits_to_gradient",
        "gradient.mul_(1 - torch.tanh(wide / cap).square())",
        "pass",
        _GEMMA4,
    ),
)
