"""Gives every field of an experiment that has no effect its one canonical value. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workloads.spec.activations.offload import canonical_offload
from workloads.spec.documents.lengths import canonical_documents
from workloads.spec.engine_versions import ENGINE, ENGINE_VERSION, ENGINES, can_fuse, fuses_by_default
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment_values import FIELDS, is_number
from workloads.spec.model_spec import canonical_model
from workloads.spec.pipeline_stages import canonical_stages, mistake_in
from workloads.spec.recomputation import canonical_recompute
from workloads.spec.recurrent_kernels import has_recurrences


def canonical_fields(fields: dict[str, Any], dp: int | None) -> dict[str, Any]:
    """The fields of `workloads.spec.experiment.Experiment.canonical`, which says what changes; ``fields`` itself is
    changed. Raises `InvalidExperiment` for both ``dp`` and one of its parts; other values that are never valid stay,
    to be refused."""
    fields["model"] = canonical_model(fields["model"])
    if dp is not None:
        if "dp_replicate" in fields or "dp_shard" in fields:
            raise InvalidExperiment(f"give dp={dp} or dp_replicate and dp_shard, not both")
        sharded = fields.get("zero_stage", 0) > 0
        fields["dp_replicate"], fields["dp_shard"] = (1, dp) if sharded else (dp, 1)
    if fields.get("dp_replicate", 1) * fields.get("dp_shard", 1) * fields.get("cp", 1) == 1:
        fields["zero_stage"] = 0
    if fields.get("pp", 1) == 1:
        fields["pp_schedule"], fields["virtual_stages"], fields["pp_split"] = "none", 1, "balanced"
        fields["pp_stages"] = None
    elif fields.get("pp_schedule", "none") == "none":
        fields["pp_schedule"] = "1f1b"
    if fields.get("virtual_stages", 1) == 1 and fields["pp_schedule"] in ("zero_bubble_v", "dualpipe_v"):
        fields["virtual_stages"] = 2  # the two legs of the V
    if isinstance(written := fields.get("pp_stages"), str) and mistake_in(written) is None:
        fields["pp_stages"], fields["pp_split"] = canonical_stages(written), "balanced"
    multiples = [fields.get("pad_vocab_to"), fields.get("tp", 1)]
    if all(map(FIELDS["tp"].accepts, multiples)) and not fields["model"].vocab_size % math.prod(multiples):
        fields["pad_vocab_to"] = None
    if fields.get("tp", 1) == 1:
        fields["sequence_parallel"] = True
    if fields.get("cp", 1) == 1:
        fields["cp_kind"] = "ring"
    fields["documents"] = canonical_documents(fields.get("documents"))
    if fields["documents"] is None:
        fields["document_balance"] = "none"
    if not has_recurrences(fields["model"]):
        fields["recurrence"] = "torch"
    if fields["model"].moe is None:
        fields |= {"etp": 1, "routing": "balanced"}
    routing = fields.get("routing", "balanced")
    if routing == "balanced":
        fields["routing_imbalance"] = 1.0
    elif is_number(fields.get("routing_imbalance", 1.0)):
        fields["routing_imbalance"] = float(fields.get("routing_imbalance", 1.0))
    if routing != "learned":
        fields["capacity_factor"] = None
    elif is_number(fields.get("capacity_factor")):
        fields["capacity_factor"] = float(fields["capacity_factor"])
    if (engine := fields.get("engine", ENGINE)) in ENGINES:
        fields.setdefault("engine_version", ENGINES[engine])
    if engine != ENGINE and fields.get("cuda_graph", "auto") == "auto":
        fields["cuda_graph"] = "none"  # no other engine captures whole steps here
    fields["recompute"] = canonical_recompute(fields.get("recompute", "none"), _stages(fields))
    if fields["recompute"] == "none":
        fields["recompute_every"] = 1
    elif fields.get("recompute_every", 1) > fields["model"].num_layers:
        fields["recompute_every"] = fields["model"].num_layers  # only the first layer is recomputed
    fields["activation_offload"] = canonical_offload(fields.get("activation_offload", "none"), fields["recompute"])
    if is_number(fields.get("optimizer_offload", 0.0)):
        fields["optimizer_offload"] = float(fields.get("optimizer_offload", 0.0))
    fields["gradient_accumulation_fusion"] = _fused(fields)
    return fields


def _stages(fields: Mapping[str, Any]) -> int | None:
    """Number of stages of the pipeline; None with values that are never valid."""
    counts = [fields.get(name, 1) for name in ("pp", "virtual_stages")]
    return math.prod(counts) if all(map(FIELDS["pp"].accepts, counts)) else None


def _fused(fields: Mapping[str, Any]) -> Any:
    """Canonical value of ``gradient_accumulation_fusion``: false where it has no effect, and without a choice what is
    usual. Values that are never valid stay, to be refused."""
    chosen = fields.get("gradient_accumulation_fusion")
    if chosen is False:
        return False
    batch = [fields.get(name, 1) for name in ("global_batch_size", "micro_batch_size", "dp_replicate", "dp_shard")]
    if not all(map(FIELDS["tp"].accepts, batch)):
        return chosen or False
    engine, version = fields.get("engine", ENGINE), fields.get("engine_version", ENGINE_VERSION)
    layout = {"engine": engine, "version": version, "num_microbatches": batch[0] / math.prod(batch[1:])}
    if chosen is not None:
        return chosen and can_fuse(**layout) if isinstance(chosen, bool) else chosen
    return fuses_by_default(**layout, zero_stage=fields.get("zero_stage", 0), compile=fields.get("compile", "none"))
