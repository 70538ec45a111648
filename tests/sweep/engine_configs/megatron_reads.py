"""``python -m tests.sweep.engine_configs.megatron_reads JOBS [--alone]``: what Megatron's own command line makes of the
flags of each job in a JSON file, one line of JSON each, after a line of what it does beyond its command line.
``--alone``: without Transformer Engine.

Parsing, Megatron's checks of the arguments (``validate_args``) and its configuration made of them are those of the
installed package. Doubles are the GPU, of which it asks the generation, and Transformer Engine, whose modules it
imports for layers that are not built here.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
import sys
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.sweep.engine_configs.missing import StandIn

VERSION = "0.19.2"
TRANSFORMER_ENGINE = "2.11.0"
HOPPER = 9
GATES = [(gate, k, pre) for gate in ("softmax", "sigmoid") for k in (1, 2) for pre in (False, True)]
"""Function of the scores, experts of a token, and whether scores of all experts instead of the chosen ones sum to 1."""
GROUPS = [(1, 2), (5, 2), (5, 3), (4, 2)]
"""Numbers of micro-batches, and how many of them a virtual stage runs in a row, on two stages."""


def flags_in(text: str) -> list[str]:
    """The words of a file of flags, as a shell would split what ``grep -v '^#'`` leaves of it."""
    return [word for line in text.splitlines() if not line.startswith("#") for word in line.split(" ")]


def folder() -> Path:
    """Where `packages` puts it: beside site-packages, where the adapter's older version is."""
    return Path(sys.prefix) / "parsers" / f"megatron-core-{VERSION}"


def prepare(transformer_engine: bool) -> Any:
    """Megatron's module of arguments, on a machine with a Hopper GPU and with or without Transformer Engine."""
    import torch

    sys.path.insert(0, str(folder()))
    os.environ["NO_VCS_VERSION"] = "1"
    # It wants Python 3.12 for this name alone.
    typing.override = getattr(typing, "override", lambda method: method)  # type: ignore[attr-defined]
    if transformer_engine:
        engine = StandIn("transformer_engine", "transformer_engine_torch", version=TRANSFORMER_ENGINE)
        sys.meta_path.insert(0, engine)
    torch.cuda.get_device_capability = lambda *_: (HOPPER, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=HOPPER, minor=0)
    warnings.simplefilter("ignore")
    from megatron.core.package_info import __version__
    from megatron.training import arguments

    assert __version__ == VERSION, __version__
    return arguments


def read(arguments: Any, job: dict[str, Any]) -> dict[str, Any]:
    """``args`` and ``config``, or the reason why Megatron ``refused`` them. ``environment``: null removes a name."""
    for name, value in job["environment"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.argv = ["pretrain_gpt.py", *job["words"]]
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            args = arguments.parse_args()
            arguments.validate_args(args)
            config = arguments.core_transformer_config_from_args(args)
    except SystemExit:  # how argparse refuses
        return {"refused": told.getvalue().strip().splitlines()[-1]}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"args": plain(vars(args)), "config": plain(vars(config)), **sizes(args)}


def sizes(args: Any) -> dict[str, Any]:
    """What it works out from its arguments once it starts: the vocabulary and the number of micro-batches."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    with contextlib.redirect_stdout(io.StringIO()):
        build_tokenizer(args)
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(
            1, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False
        )
    return {"vocabulary": args.padded_vocab_size, "microbatches": calculator.get_num_microbatches()}


def facts(arguments: Any) -> dict[str, Any]:
    """Its options, the sums of a token's weights over experts, and what its layers and schedules refuse to run."""
    import argparse

    import torch
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    logits = torch.tensor([[0.5, 1.5, 2.0]])
    kinds = {f"{gate} {k} {pre}": (gate, k, pre) for gate, k, pre in GATES}
    sums = {
        name: float(topk_routing_with_score_function(logits, k, pre, score_function=gate)[0].sum())
        for name, (gate, k, pre) in kinds.items()
    }
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    layer = SimpleNamespace(training=True, attn_tp_group=two, config=SimpleNamespace(sequence_parallel=False))
    zeros = torch.zeros

    def on_the_cpu(*size: Any, **options: Any) -> torch.Tensor:
        return zeros(*size, **{**options, "device": "cpu"})

    torch.zeros = on_the_cpu  # a counter of tokens, on the GPU

    def interleaved(count: int, group: int) -> str:
        chunk: Any = torch.nn.Identity()
        chunk.config, chunk.model_type = config(microbatch_group_size_per_vp_stage=group), None
        return refusal(
            lambda: forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[],
                model=[chunk, chunk],
                num_microbatches=count,
                seq_length=8,
                micro_batch_size=1,
                p2p_communicator=SimpleNamespace(pp_group=two, config=chunk.config),
                pg_collection=SimpleNamespace(tp=two, cp=two),
            )
        )

    def config(**fields: Any) -> Any:
        return arguments.TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=1, **fields)

    def local_norm(**fields: bool) -> str:
        own = config(persist_layer_norm=False, normalization="RMSNorm")
        vars(own).update(fields)
        return refusal(lambda: WrappedTorchNorm(own, 8))

    return {
        "options": [option for action in parser._actions for option in action.option_strings],
        "sums": sums,
        "experts with tp alone": refusal(lambda: MoELayer.forward(layer, None)),
        "local norm": {name: local_norm(**{name: True}) for name in ("sequence_parallel", "persist_layer_norm")}
        | {"": local_norm()},
        "local softmax": {
            str(fused): refusal(
                lambda fused=fused: FusedScaleMaskSoftmax(
                    False, True, AttnMaskType.causal, fused, None, True, None
                ).is_kernel_available(None, 1, 4, 64, 64)
            )
            for fused in (True, False)
        },
        "local attention with cp": refusal(
            lambda: DotProductAttention(config(context_parallel_size=2), 1, AttnMaskType.causal, "self")
        ),
        "interleaved": {f"{count} in {group}": interleaved(count, group) for count, group in GROUPS},
    }


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.name if isinstance(value, enum.Enum) else value for name, value in values.items()}


def main(jobs: str, transformer_engine: bool = True) -> None:
    arguments = prepare(transformer_engine)
    print(json.dumps(facts(arguments)))
    for job in json.loads(Path(jobs).read_text()):
        print(json.dumps(read(arguments, job), default=str))


if __name__ == "__main__":
    main(sys.argv[1], "--alone" not in sys.argv)
