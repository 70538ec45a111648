"""``python -m tests.sweep.engine_configs.accelerate_reads FOLDER...``: what is made of each exported folder, as JSON.

One line each: the environment that accelerate's launcher gives its processes, what accelerate makes of it there, and
transformers' model. With ``--run FOLDER`` instead, two steps of the script on one CPU process.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock


def read(folder: Path) -> dict[str, Any]:
    """Raises what the packages raise for files that they do not take."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ
    found = {file.name: launched(folder, file.name) for file in sorted(folder.glob("*.yaml"))}
    return found | {
        "model": {key: getattr(config, key, None) for key in json.loads((folder / "config.json").read_text())},
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def launched(folder: Path, file: str) -> dict[str, Any]:
    """The environment of the processes, and the plugins that are made from it."""
    from accelerate.commands import launch
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    parser = launch.launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(folder / file), "--main_process_port", "0", "train.py"])
    arguments, _, _ = launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        environment = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        environment = prepare_multi_gpu_env(arguments)
    ours = {k: v for k, v in environment.items() if k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}
    with mock.patch.dict(os.environ, ours):
        fsdp, dynamo, mesh = FullyShardedDataParallelPlugin(), TorchDynamoPlugin(), ParallelismConfig()
    return {
        "environment": ours,
        "processes": arguments.num_processes,
        "fsdp": [fsdp.fsdp_version, fsdp.reshard_after_forward, fsdp.activation_checkpointing],
        "compiled": [dynamo.backend.value, dynamo.use_regional_compilation],
        "mesh": [mesh.dp_replicate_size, mesh.dp_shard_size],
    }


def run(folder: Path) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    script = folder / "train.py"
    names = runpy.run_path(str(script))
    names["main"].__globals__["STEPS"] = 2
    names["main"]()


def main(arguments: list[str]) -> None:
    if arguments[0] == "--run":
        run(Path(arguments[1]))
        return
    for folder in arguments:
        with contextlib.redirect_stdout(sys.stderr):
            found = read(Path(folder))
        print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
