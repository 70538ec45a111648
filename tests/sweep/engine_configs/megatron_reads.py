"""``python -m tests.sweep.engine_configs.megatron_reads FILE...``: what Megatron makes of each file of flags, one line
of JSON each: Megatron-Core's configuration after its own checks, and Megatron-LM's own arguments where it is there."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "fp8_format": "fp8",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "group_query_attention": None,  # num_query_groups says it
}
"""Flags whose name in the configuration is another, as `core_transformer_config_from_args` has them."""


def flags_in(path: Path) -> dict[str, Any]:
    """Flags by the name of their argument."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            name, *values = line.removeprefix("--").split(" ")
            found[name.replace("-", "_")] = True if not values else values if len(values) > 1 else values[0]
    return found


def typed(value: Any) -> Any:
    """A flag's text as the number that it is."""
    if isinstance(value, str):
        for number in (int, float):
            try:
                return number(value)
            except ValueError:
                pass
    return value


def core_config(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that Megatron-Core's configuration has, read and checked by it (``__post_init__``)."""
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if flags.get("multi_latent_attention") else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    given = {RENAMED.get(name, name): typed(value) for name, value in flags.items()}
    given = {name: value for name, value in given.items() if name in names}
    given["attention_backend"] = AttnBackend[given["attention_backend"]]
    given["add_bias_linear"] = "disable_bias_linear" not in flags
    if given["pipeline_model_parallel_size"] > 1 or "pipeline_model_parallel_layout" in given:
        given["pipeline_dtype"] = torch.bfloat16
    if layer_freq := flags.get("moe_layer_freq"):
        given["moe_layer_freq"] = eval(layer_freq, {"__builtins__": {}})  # as its own parser does
    if isinstance(given.get("recompute_modules"), str):
        given["recompute_modules"] = [given["recompute_modules"]]
    config = kind(**given)
    return {name: getattr(config, name) for name in given}


def own_arguments(path: Path) -> dict[str, Any] | None:
    """What ``pretrain_gpt.py`` itself would parse; None without Megatron-LM's own code."""
    try:
        if importlib.util.find_spec("megatron.training") is None:
            return None
    except ModuleNotFoundError:
        return None
    from megatron.training.arguments import parse_args

    words = [word for line in path.read_text().splitlines() if not line.startswith("#") for word in line.split(" ")]
    sys.argv = ["pretrain_gpt.py", *words]
    return vars(parse_args())


def main(files: list[str]) -> None:
    for file in map(Path, files):
        flags = flags_in(file)
        read = {"flags": flags, "core": core_config(flags), "own": own_arguments(file)}
        print(json.dumps(read, default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
