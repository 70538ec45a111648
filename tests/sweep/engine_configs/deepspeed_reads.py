"""``python -m tests.sweep.engine_configs.deepspeed_reads FILE DP...``: what DeepSpeed makes of each file of its own
options on so many data-parallel ranks, one line of JSON each: what its configuration holds after its own checks."""

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
    }


def main(arguments: list[str]) -> None:
    sys.meta_path.append(StandIn("msgpack", "ninja", "cpuinfo", "tqdm", "einops"))
    logging.disable(logging.WARNING)
    for file, data_parallel in zip(arguments[::2], arguments[1::2], strict=True):
        print(json.dumps(read(file, int(data_parallel)), default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
