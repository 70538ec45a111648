"""``python -m tests.sweep.engine_configs.deepspeed_reads FILE DP...``: what DeepSpeed makes of each file of its own
options on so many data-parallel ranks, one line of JSON each: what its configuration holds after its own checks, and
which optimizer its engine would make or why it refuses."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

from tests.sweep.engine_configs.missing import StandIn

READ = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "world_size"),
    *("zero_optimization_stage", "gradient_clipping", "grad_accum_dtype", "optimizer_name", "optimizer_params"),
)


def read(file: str, data_parallel: int) -> dict[str, Any]:
    """Raises what DeepSpeed raises for a file that it does not take."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    comm.get_rank = lambda: 0  # no process group is needed to read a file
    config = DeepSpeedConfig(file, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: data_parallel))
    found = {name: getattr(config, name) for name in READ}
    return found | {
        "bf16": config.bfloat16_config.enabled,
        "fp16": config.float16_config.enabled,
        "pipeline": config.pipeline,
        "autotp_size": config.tensor_parallel_config.autotp_size,
        "sequence_parallel_size": config._param_dict.get("sequence_parallel_size"),
        "data_parallel_size": config._param_dict.get("data_parallel_size"),
        "mixed_precision": mixed_precision(config),
    }


def mixed_precision(config: Any) -> str:
    """The kind of optimizer that its engine chooses for the file's types and stage, or why it refuses them."""
    import torch
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.engine import DeepSpeedEngine

    parameters = torch.float32
    if config.bfloat16_config.enabled or config.float16_config.enabled:
        parameters = torch.bfloat16 if config.bfloat16_config.enabled else torch.float16
    gradients = parameters if config.grad_accum_dtype is None else DtypeEnum(config.grad_accum_dtype).value
    engine = SimpleNamespace(
        get_data_types=lambda: (parameters, gradients),
        zero_optimization=lambda: config.zero_enabled,
        zero_optimization_stage=lambda: config.zero_optimization_stage,
        zero_cpu_offload=lambda: False,
        zero_compute_grad_norm=lambda: True,
        pipeline_parallelism=False,
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    try:
        return str(DeepSpeedEngine._do_optimizer_sanity_check(engine, optimizer))
    except NotImplementedError as error:
        return f"refused: {error}"


def main(arguments: list[str]) -> None:
    sys.meta_path.append(StandIn("msgpack", "ninja", "cpuinfo", "tqdm", "einops"))
    logging.disable(logging.WARNING)
    for file, data_parallel in zip(arguments[::2], arguments[1::2], strict=True):
        print(json.dumps(read(file, int(data_parallel)), default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
