"""``python -m tests.sweep.engine_configs.torchtitan_reads FOLDER...``: what torchtitan's own `ConfigManager` makes of
the file in each folder, and its model of that name and flavor, one line of JSON each. First its own flavors."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

from tests.sweep.engine_configs.missing import stand_in_for

FFN = "real feed-forward size"


def shape_of(args: object) -> dict[str, object]:
    """The arguments of a model, with the feed-forward size that its Llama works out (`model.FeedForward`)."""
    shape = dataclasses.asdict(args)
    if "multiple_of" in shape:
        hidden = int(2 * 4 * shape["dim"] / 3)
        if shape["ffn_dim_multiplier"] is not None:
            hidden = int(shape["ffn_dim_multiplier"] * hidden)
        shape[FFN] = shape["multiple_of"] * ((hidden + shape["multiple_of"] - 1) // shape["multiple_of"])
    return shape


def main(folders: list[str]) -> None:
    stand_in_for("datasets", "einops", "torch.utils.tensorboard", "tokenizers", "torchao", "torchdata", "wandb")
    stand_in_for("torchtitan.models.moe.kernels")  # of Triton, which is not there without CUDA
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec

    own = {
        family: {flavor: shape_of(args) for flavor, args in train_spec.get_train_spec(family).model_args.items()}
        for family in ("llama3", "qwen3", "deepseek_v3")
    }
    print(json.dumps(own))
    for folder in folders:
        config = ConfigManager().parse_args(["--job.config_file", str(Path(folder) / "torchtitan.toml")])
        if config.experimental.custom_import:
            sys.path.insert(0, folder)
            importlib.import_module(config.experimental.custom_import)
        spec = train_spec.get_train_spec(config.model.name)
        print(json.dumps({"config": config.to_dict(), "model": shape_of(spec.model_args[config.model.flavor])}))
        if config.experimental.custom_import:
            sys.path.remove(folder)
            del sys.modules[config.experimental.custom_import]
            train_spec._extra_train_specs.clear()


if __name__ == "__main__":
    main(sys.argv[1:])
