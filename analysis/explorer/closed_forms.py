"""The planner's closed forms as a script of the page, translated from their Python sources when a page is written.

``python -m analysis.explorer.closed_forms`` prints the script.
"""

from __future__ import annotations

from functools import cache

from analysis.to_javascript.bundle import translated
from analysis.to_javascript.modules import NotPortable

VARIABLE = "ClosedForms"
"""Name of the script's only global; it holds the definitions below by their names in Python."""
_SHAPE = "workloads.costs.shape"
DEFINITIONS = (
    *(("workloads.spec.experiment", "Experiment"), ("workloads.spec.model_spec", "ModelSpec")),
    *(("workloads.spec.mesh", name) for name in ("data_degrees", "expert_degrees")),
    *((f"{_SHAPE}.params", name) for name in ("COMPUTE_BYTES", "MASTER_BYTES", "dense_layer", "local_params")),
    *((f"{_SHAPE}.params", name) for name in ("moe_layer", "num_dense_layers", "num_params")),
    *((f"{_SHAPE}.flops", name) for name in ("head_sizes",)),
    *((f"{_SHAPE}.fp8", name) for name in ("cast_bytes", "gathered_bytes", "is_fp8", "keeps_fp8", "kept_inputs")),
    *((f"{_SHAPE}.fp8", name) for name in ("working_bytes",)),
    *((f"{_SHAPE}.expert_loads", name) for name in ("sent_tokens", "skewed_loads")),
    *((f"{_SHAPE}.partition", name) for name in ("experiment_chunks", "experiment_stages")),
    *((f"{_SHAPE}.schedule", name) for name in ("INTERLEAVED", "SPLIT_BACKWARD", "V_SHAPED", "_SCHEDULES")),
    *((f"{_SHAPE}.schedule", name) for name in ("ChunkState", "held", "held_by_chunk", "microbatches_in_flight")),
    *((f"{_SHAPE}.schedule", name) for name in ("schedule_actions", "stage_at")),
    ("workloads.costs.memory.estimate", "moments_held"),
    ("workloads.costs.time.pipeline", "simulate"),
)
"""Functions, classes and constants that scripts of the page use, each as (module, name); what these use comes along."""
MEMBERS = ("compiles", "dp", "num_microbatches", "recomputed_operations", "world_size")
"""Methods and properties that scripts of the page use."""


@cache
def script() -> str:
    """The script, which defines `VARIABLE`; it uses ``templates/explorer/python.js``."""
    return translated(VARIABLE, DEFINITIONS, MEMBERS)


if __name__ == "__main__":
    try:
        print(script())
    except NotPortable as refusal:
        raise SystemExit(str(refusal)) from None
