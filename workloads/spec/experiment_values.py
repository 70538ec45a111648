"""The values that the fields of an experiment may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from workloads.spec.activations.offload import MUST as MUST_BE_OFFLOAD
from workloads.spec.activations.offload import is_offload
from workloads.spec.checks import LARGEST, Values, one_of, texts, whole_numbers
from workloads.spec.documents.lengths import MUST as MUST_BE_DOCUMENTS
from workloads.spec.documents.lengths import DocumentValues, is_written
from workloads.spec.pipeline_stages import stages_texts
from workloads.spec.recomputation import recompute_texts

PipelineSchedule = Literal[
    "none", "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v"
]
PipelineSplit = Literal["balanced", "even", "ends_count"]
ContextKind = Literal["ring", "allgather", "ulysses"]
Precision = Literal["bf16", "fp16", "fp32", "fp64", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]
PLANNED_FORMATS: tuple[Precision, ...] = ("mxfp8", "nvfp4")
"""Formats of matrix products that are planned, and that this engine cannot run: blocks of 32 numbers of 8 bits with one
scale of 8 bits (OCP Microscaling Formats 1.0), and blocks of 16 numbers of 4 bits with one scale of 8 bits (NVIDIA,
arXiv:2509.25149)."""
Attention = Literal["auto", "cudnn", "flash", "efficient", "math", "flash4"]
Recurrence = Literal["torch", "fla", "mamba_ssm"]
Compile = Literal["none", "block"]
Routing = Literal["balanced", "skewed", "learned"]
CudaGraph = Literal["none", "step", "auto"]
OptimizerName = Literal["adamw", "muon", "adafactor", "sgd"]
StoredIn = Literal["fp32", "bf16"]
"""Number formats of what a step keeps beside activations; fp32 is fp64 with ``precision=fp64``."""
DocumentBalance = Literal["none", "greedy"]


def is_number(value: object, least: float = -LARGEST) -> bool:
    """Whether a value is a number from ``least`` to the largest that fields take; true and false are none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return least <= value <= LARGEST


COUNTS = (
    *("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "micro_batch_size", "global_batch_size", "seq_len"),
    *("virtual_stages", "recompute_every", "etp"),
)
"""Fields of `Experiment` that are whole numbers of at least 1, in the order of their checks."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "pp_schedule": get_args(PipelineSchedule),
    "pp_split": get_args(PipelineSplit),
    "cp_kind": get_args(ContextKind),
    "precision": get_args(Precision),
    "attention": get_args(Attention),
    "recurrence": get_args(Recurrence),
    "compile": get_args(Compile),
    "routing": get_args(Routing),
    "cuda_graph": get_args(CudaGraph),
    "grad_reduce": get_args(StoredIn),
    "optimizer": get_args(OptimizerName),
    "optimizer_states": get_args(StoredIn),
    "master_weights": get_args(StoredIn),
    "document_balance": get_args(DocumentBalance),
}
FIELDS: Mapping[str, Values] = {
    **dict.fromkeys(COUNTS, whole_numbers(1)),
    "zero_stage": one_of(0, 1, 2, 3),
    **{field: one_of(*words) for field, words in _CHOICES.items()},
    "recompute": recompute_texts(),
    "activation_offload": Values(accepts=is_offload, must=MUST_BE_OFFLOAD),
    "sequence_parallel": one_of(True, False),
    "gradient_accumulation_fusion": one_of(True, False),
    "seed": Values(accepts=lambda value: type(value) is int and abs(value) < 2**63, must="a whole number"),
    "routing_imbalance": Values(accepts=lambda value: is_number(value, 1.0), must="a number of at least 1"),
    "capacity_factor": Values(
        accepts=lambda value: value is None or is_number(value, 1e-9), must="null or a number above 0"
    ),
    "optimizer_offload": Values(
        accepts=lambda value: is_number(value, 0.0) and not is_number(value, math.nextafter(1.0, 2.0)),
        must="a number from 0 to 1",
    ),
    "pp_stages": stages_texts(),
    "pad_vocab_to": Values(
        accepts=lambda value: value is None or whole_numbers(1).accepts(value),
        must="null or a whole number of at least 1",
    ),
    "documents": DocumentValues(accepts=is_written, must=MUST_BE_DOCUMENTS),
    "engine": texts(),
    "engine_version": texts(),
}
"""Rule for every field of an `Experiment` but its model. Stored experiments may have engines that are not in
`ENGINES`."""
