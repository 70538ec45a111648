"""``python -m tests.sweep.engine_configs.torchtitan03_reads FOLDER...``: what torchtitan 0.3's own `ConfigManager`
makes of the module in each folder, and its model after the trainer's changes, one line of JSON each."""

from __future__ import annotations

import json
import sys

import torch

from sweep.engine_configs.torchtitan03 import CONFIG, MODULE
from tests.sweep.engine_configs.missing import stand_in_for


def main(folders: list[str]) -> None:
    stand_in_for("datasets", "torch.utils.tensorboard", "tokenizers", "torchao", "torchdata", "wandb", "einops")
    stand_in_for("torchtitan.distributed.minimal_async_ep.kernels")  # of Triton, which is not there without CUDA
    from torchtitan.components.quantization import float8
    from torchtitan.config import ConfigManager

    float8.has_cuda_capability = lambda major, minor: True
    for folder in folders:
        sys.path.insert(0, folder)
        config = ConfigManager().parse_args(["--module", MODULE, "--config", CONFIG])
        config.model_spec.model.update_from_config(config=config)  # as the trainer does, with its own refusals
        read = config.to_dict()
        read["activation_checkpoint"] = type(config.activation_checkpoint).__qualname__.removesuffix(".Config")
        with torch.device("meta"):
            model = config.model_spec.model.build()
        read["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        layers = read["model_spec"]["model"]["layers"]
        read["model_spec"]["model"]["layers"] = [len(layers), layers[0], layers[-1]]
        print(json.dumps(read, default=repr))
        sys.path.remove(folder)
        del sys.modules[MODULE]


if __name__ == "__main__":
    main(sys.argv[1:])
