"""The script that an export for transformers writes beside its configuration files: a training loop as accelerate's
documentation has it, with the settings that such a file cannot hold."""

from __future__ import annotations

from string import Template

from sweep.engine_configs.draft import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    STEPS,
    WEIGHT_DECAY,
)
from workloads.spec.experiment import Experiment

_SCRIPT = Template('''\
"""Trains the model of config.json on random tokens: accelerate launch --config_file accelerate.yaml train.py"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM

STEPS, SEED = $steps, $seed
MICRO_BATCH_SIZE, ACCUMULATION, SEQ_LEN = $micro_batch_size, $accumulation, $seq_len


def main():
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=ACCUMULATION, sync_each_batch=$sync_each_batch
        )
    )
    state, device = accelerator.state, accelerator.device
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if state.deepspeed_plugin is not None:
        state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = MICRO_BATCH_SIZE
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(Path(__file__).parent)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=$attention, dtype=torch.float32)
    # Families with a vision part name its layers, too, which FSDP would miss here.
    model._no_split_modules = set(model._no_split_modules) & {type(module).__name__ for module in model.modules()}
    if $checkpointing or $recompute and state.deepspeed_plugin is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=$learning_rate, betas=$betas, eps=$epsilon, weight_decay=$weight_decay, fused=True
    )
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    torch.manual_seed(SEED + accelerator.process_index)
    for step in range(STEPS):
        for _ in range(ACCUMULATION):
            tokens = torch.randint(config.vocab_size, (MICRO_BATCH_SIZE, SEQ_LEN + 1), device=device)
            targets = tokens[:, 1:].contiguous()
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens[:, :-1], labels=targets, shift_labels=targets).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), $max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
''')


def script(e: Experiment, *, fused: bool) -> str:
    """The script for an experiment. ``fused``: whether the model's class takes torch's fused attention."""
    return _SCRIPT.substitute(
        attention='"sdpa"' if fused else '"flex_attention" if device.type == "cuda" else "eager"',
        steps=STEPS,
        micro_batch_size=e.micro_batch_size,
        accumulation=e.num_microbatches,
        seq_len=e.seq_len,
        seed=e.seed,
        sync_each_batch=e.zero_stage >= 2,
        recompute=e.recompute == "full",
        checkpointing=e.recompute == "full" and e.zero_stage == 0,
        learning_rate=LEARNING_RATE,
        betas=BETAS,
        epsilon=EPSILON,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
    )
