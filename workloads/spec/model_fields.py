"""The fields of a model file, each with its check, so that all mistakes of a file are reported at once. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workloads.spec.checks import check_names, flag, mapping, number, one_of, texts, whole_number
from workloads.spec.errors import InvalidExperiment
from workloads.spec.mistakes import Mistakes

Check = Callable[[str, Any], object]
"""A check of one value: ``check(place, value)`` raises `InvalidExperiment` for a wrong one."""

_count: Check = partial(whole_number, least=1, error=InvalidExperiment)
_count_or_0: Check = partial(whole_number, least=0, error=InvalidExperiment)
_factor: Check = partial(number, least=0, error=InvalidExperiment)
_flag: Check = partial(flag, error=InvalidExperiment)
_positive: Check = partial(number, above=0, error=InvalidExperiment)
_text: Check = partial(texts().check, error=InvalidExperiment)

_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size")
OF_LAYERS: Mapping[str, Check] = {"mtp_modules": _count_or_0, "mtp_loss_weight": _positive}
"""Fields of files that `ModelSpec` has in its list of layers."""
_MODEL: Mapping[str, Check] = {
    "name": _text,
    **dict.fromkeys(_SIZES, _count),
    **dict.fromkeys(("tie_embeddings", "qk_norm"), _flag),
    **dict.fromkeys(("rope_theta", "norm_eps"), _positive),
    **OF_LAYERS,
}
_MOE: Mapping[str, Check] = {
    **dict.fromkeys(("num_experts", "experts_per_token", "expert_hidden_size"), _count),
    **dict.fromkeys(("num_shared_experts", "num_dense_layers"), _count_or_0),
    **dict.fromkeys(("weight_scale", "balance_coefficient"), _factor),
    "normalize_weights": _flag,
    "gate": partial(one_of("softmax", "sigmoid").check, error=InvalidExperiment),
    "balance": partial(one_of("none", "aux_loss", "bias").check, error=InvalidExperiment),
}
_MLA: Mapping[str, Check] = {
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _count),
    "q_lora_rank": _count_or_0,
}
_PARTS: Mapping[str, tuple[Mapping[str, Check], tuple[str, ...]]] = {
    "moe": (_MOE, ("num_experts", "experts_per_token", "expert_hidden_size")),
    "mla": (_MLA, ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
}
"""The parts of a model: the checks of their fields, and the fields that must be given."""


def refuse_mistakes(label: str, fields: Mapping[str, Any]) -> None:
    """Check the names and values of a model file, each by itself; how they fit together is checked later.

    Raises `InvalidExperiment` with a message for every mistake. ``head_dim`` may be null.
    """
    mistakes = Mistakes()
    given = {name: value for name, value in fields.items() if name != "head_dim" or value is not None}
    needed = [name for name in _SIZES if name not in _optional(fields)]
    _collect(mistakes, label, given, {**_MODEL, "moe": _ignore, "mla": _ignore, "layers": _ignore}, needed)
    for part, (checks, needed_of_part) in _PARTS.items():
        if fields.get(part) is not None:
            with mistakes.collected():
                values = mapping(f"{label}: {part}", fields[part], error=InvalidExperiment)
                _collect(mistakes, f"{label}: {part}", values, checks, needed_of_part)
    mistakes.refuse()


def _optional(fields: Mapping[str, Any]) -> set[str]:
    """Sizes that follow from others or have no effect, and so may be left out."""
    moe = fields.get("moe")
    optional = {"head_dim"} | ({"num_kv_heads"} if fields.get("mla") is not None else set())
    return optional | ({"ffn_hidden_size"} if isinstance(moe, Mapping) and not moe.get("num_dense_layers") else set())


def _ignore(place: str, value: Any) -> None:
    """The check of a part, whose fields are checked by themselves."""


def _collect(
    mistakes: Mistakes, place: str, fields: Mapping[str, Any], checks: Mapping[str, Check], needed: Any
) -> None:
    with mistakes.collected():
        check_names(place, fields, list(checks), needed, noun="field", error=InvalidExperiment)
    for name, check in checks.items():
        if name in fields:
            with mistakes.collected():
                check(f"{place}: {name}", fields[name])
