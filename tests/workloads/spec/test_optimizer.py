"""What an optimizer keeps, against torch's, and the bytes of what an experiment stores in bf16."""

from __future__ import annotations

import torch

from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.updates.optimizer import master_bytes, optimizer_of, reduced_bytes

MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=256,
)
USUAL = Experiment.canonical(model=MODEL, global_batch_size=1)


def test_adamw_keeps_what_torch_keeps() -> None:
    weight = torch.nn.Parameter(torch.zeros(64))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if value.shape == weight.shape]
    assert sum(value.nbytes for value in state) == optimizer_of(USUAL).state_bytes(weight.numel())


def test_formats_of_an_experiment() -> None:
    def of(**fields: str) -> tuple[int, int, int, int]:
        e = Experiment.canonical(model=MODEL, global_batch_size=1, **fields)
        spec = optimizer_of(e)
        return master_bytes(e), reduced_bytes(e), spec.state_bytes(1), spec.traffic_bytes

    assert of() == (4, 4, 8, 40)
    assert of(precision="fp64") == (8, 8, 16, 80)
    assert of(optimizer_states="bf16") == (4, 4, 4, 32)
    assert of(master_weights="bf16") == (2, 4, 8, 28)
    assert of(grad_reduce="bf16", precision="fp8_rowwise") == (4, 2, 8, 40)
