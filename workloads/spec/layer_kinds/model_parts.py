"""Parts of a model's shape that numbers describe: routed experts and latent attention. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Gate = Literal["softmax", "sigmoid"]
Balance = Literal["none", "aux_loss", "bias"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Routed feed-forward layers. The first ``num_dense_layers`` layers stay dense, with ``ffn_hidden_size``."""

    num_experts: int
    experts_per_token: int
    expert_hidden_size: int
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    gate: Gate = "softmax"
    """Function that turns an expert's logit into its score: softmax over all experts (Mixtral, arXiv:2401.04088) or
    sigmoid of each logit (DeepSeek-V3, arXiv:2412.19437)."""
    normalize_weights: bool = True
    """Divide the weights of a token's chosen experts by their sum."""
    weight_scale: float = 1.0
    """Factor by which the weights are finally multiplied."""
    balance: Balance = "none"
    """Method that balances learned routing over the experts. ``aux_loss``: a loss term for every sequence (DeepSeek-V3,
    equations 17 to 20); ``bias``: one number per expert, added to the scores for the choice of experts and moved
    against the load after every step (arXiv:2408.15664)."""
    balance_coefficient: float = 0.0
    """Coefficient of the loss term, or size of one change of the bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are
    projected from one latent, queries from another, and all heads share one rotated key."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    """Size of the latent of queries; 0: queries are projected from the input without a latent (DeepSeek-V2-Lite)."""

    @property
    def qk_head_dim(self) -> int:
        """Size of a query or a key: a part without position and a rotated one."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
