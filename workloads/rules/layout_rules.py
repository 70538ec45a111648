"""Structural rules: conditions that a layout must meet before memory or time are estimated. No torch here.

A rule is data: the condition under which a layout breaks it and the sentence that says so, both in the language of
`workloads.spec.expressions` over the names of `names_of`. So each rule is stated once: the planner evaluates it here
(`violations`), and the report's explorer evaluates the same data in the browser.

A sentence says what is wrong, with the numbers, and what would work. ``engine_support`` is the only rule about this
version of the engine instead of the layout.

Fewer micro-batches than stages is not a rule: such a pipeline runs, mostly idle. (The Ultra-Scale Playbook's engine
needed ``num_microbatches >= pp - 1``.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from workloads.rules.activation_cases import OFFLOAD_CASES, OFFLOAD_CLUSTER_CASES
from workloads.rules.attention_kernels import ATTENTION_CASES
from workloads.rules.captured_steps import CAPTURE_CASES
from workloads.rules.derived_values import DERIVED, FUNCTIONS, SPLIT
from workloads.rules.document_cases import DOCUMENT_CASES
from workloads.rules.engine_support import refused
from workloads.rules.fp8_cases import FP8_CASES
from workloads.rules.recompute_cases import RECOMPUTE_CASES
from workloads.rules.rule_values import CLUSTER_NAMES, LAYOUT_NAMES, cluster_values, layout_values
from workloads.rules.update_rules import UPDATE_CASES, UPDATES_LACKING
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.expressions import Expression, Template, compile_tests, parse, parse_template

Scope = Literal["layout", "cluster", "engine"]


class Violation(NamedTuple):
    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, or one case of a rule whose sentence differs from case to case. At most one case of a rule is broken at
    a time."""

    name: str
    scope: Scope
    """Inputs of the condition: the layout and the model alone, also the cluster, or the abilities of this engine."""
    broken: Expression
    message: Template


def _rules(scope: Scope, *stated: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Makes rules from (name, condition that breaks the rule, sentence)."""
    return tuple(
        Rule(name, scope, parse(broken, name, FUNCTIONS), parse_template(message, name, FUNCTIONS))
        for name, broken, message in stated
    )


_DIVIDED = {"vocab_size": "padded_vocab_size"}
"""Sizes of `SPLIT` that copies of heads or padded rows enlarge, each with its enlarged size in `DERIVED`."""
_MULTIPLES = (
    "{'' if has_latent_attention or num_kv_heads == num_heads else ', or a multiple of num_kv_heads that divides the "
    "others'}"
)
"""Degrees that copy key and value heads, which no list of divisors has."""

_LAYOUT = _rules(
    "layout",
    (
        "global_batch",
        "rest and global_batch_size > round",
        "global_batch_size={global_batch_size} is not a multiple of dp*micro_batch_size = {dp}*{micro_batch_size} = "
        "{round}; {global_batch_size - rest} or {global_batch_size - rest + round} would be",
    ),
    (
        "global_batch",
        "rest and global_batch_size < round",
        "global_batch_size={global_batch_size} is not a multiple of dp*micro_batch_size = {dp}*{micro_batch_size} = "
        "{round}; {round} would be",
    ),
    (
        "pp_layers",
        "not stages_written and virtual_stages == 1 and pp > num_layers",
        "pp={pp} stages need at least as many layers, {model} has {num_layers}; use at most that many",
    ),
    (
        "pp_layers",
        "not stages_written and virtual_stages > 1 and chunks > num_layers",
        "pp*virtual_stages = {pp}*{virtual_stages} = {chunks} stages need at least as many layers, "
        "{model} has {num_layers}; use at most that many",
    ),
    (
        "pp_layers",
        "not stages_written and mtp_modules > 1 and chunks > num_layers - mtp_modules + 1 and chunks <= num_layers",
        "pp*virtual_stages = {pp}*{virtual_stages} = {chunks} stages; the last one holds all {mtp_modules} multi-token "
        "modules of {model}, and each other one needs one of its {num_layers - mtp_modules} layers; use at most "
        "{num_layers - mtp_modules + 1}",
    ),
    (
        "pp_stages",
        "stages_written and stages_written != chunks",
        "pp_stages={pp_stages} has {stages_written} stages, but pp*virtual_stages = {pp}*{virtual_stages} = {chunks}; "
        "{'use virtual_stages=' if stages_written % pp == 0 else 'pp may be one of '}"
        "{stages_written // pp if stages_written % pp == 0 else divisors(stages_written)}",
    ),
    (
        "pp_stages",
        "stages_written == chunks and layers_written != num_layers",
        "pp_stages={pp_stages} has {layers_written} layers (t), but {model} has {num_layers}",
    ),
    (
        "pp_stages",
        "stages_written == chunks and layers_written == num_layers and modules_elsewhere",
        "pp_stages={pp_stages} must name the {mtp_modules} multi-token modules of {model} as m in its last stage: they "
        "need the embedding, which the last stage has a copy of, and the head",
    ),
    (
        "pp_schedule",
        "not schedule_fits",
        "pp_schedule={pp_schedule} with pp={pp}; it must be none if pp is 1, and a schedule otherwise",
    ),
    # If the schedule does not fit pp, virtual stages are not checked. Every schedule accepts any number of
    # micro-batches: the action lists of `workloads.costs.shape.schedule` leave out those that are missing in the last
    # round.
    (
        "virtual_stages",
        "schedule_fits and (virtual_stages < least_chunks or virtual_stages > least_chunks and not interleaved)",
        "pp_schedule={pp_schedule} with virtual_stages={virtual_stages}; it needs "
        "{least_chunks}{' or more' if interleaved else ''}",
    ),
    *(
        (
            f"tp_{field}",
            _DIVIDED.get(field, field) + " % tp",
            f"tp={{tp}} does not divide {field}={{{field}}} of {{model}}; tp may be one of {{divisors(split)}}"
            + _MULTIPLES,
        )
        for field in SPLIT
        if field != "num_kv_heads"
    ),
    (
        "tp_num_kv_heads",
        "held_kv_heads % tp",
        "tp={tp} neither divides num_kv_heads={num_kv_heads} of {model} nor is a multiple of it that divides "
        "num_heads={num_heads}; tp may be one of {divisors(split)}, or such a multiple",
    ),
    (
        "tp_recurrent_heads",
        "recurrent_heads % tp",
        "tp={tp} does not divide the {recurrent_heads} heads or groups that all recurrent layers of {model} share; "
        "tp may be one of {divisors(gcd(split, recurrent_heads))}",
    ),
    (
        "sequence_parallel",
        "sequence_parallel and tokens % tp",
        "sequence parallelism splits micro_batch_size*seq_len/cp = {micro_batch_size}*{seq_len}/{cp} = {tokens} tokens "
        "over tp={tp} ranks; tp may be one of {divisors(gcd(tokens, split))}",
    ),
    (
        "cp_seq_len",
        "cp > 1 and seq_len % cp_part",
        "cp={cp} balances causal attention by cutting a sequence into 2*cp = {cp_part} equal parts; seq_len={seq_len} "
        "is not a multiple of {cp_part}, {seq_len // cp_part * cp_part + cp_part} would be",
    ),
    *(
        (
            f"cp_{field}",
            f"cp > 1 and cp_kind == 'ulysses' and {held} % tp == 0 and {held} // tp % cp",
            f"cp_kind=ulysses gives every rank whole heads: cp={{cp}} does not divide the {{{held} // tp}} of "
            f"{field}={{{field}}} that each of tp={{tp}} ranks has; use cp_kind=ring or allgather",
        )
        for field, held in (("num_heads", "num_heads"), ("num_kv_heads", "held_kv_heads"))
    ),
    (
        "cp_recurrent_heads",
        "cp > 1 and recurrent_key and recurrent_heads % tp == 0 and recurrent_heads // tp % cp",
        "cp={cp} ranks exchange tokens of recurrent layers for whole heads and groups: cp does not divide the "
        "{recurrent_heads // tp} of the {recurrent_heads} that all recurrent layers of {model} share that each of "
        "tp={tp} ranks has; cp may be one of {divisors(recurrent_heads // tp)}",
    ),
    ("ep_model", "ep > 1 and not has_experts", "ep={ep}, but {model} has no experts; ep must be 1"),
    (
        "ep_num_experts",
        "has_experts and num_experts % ep",
        "ep={ep} does not divide num_experts={num_experts} of {model}; ep may be one of {divisors(num_experts)}",
    ),
    (
        "etp",
        "etp > 1 and etp != tp",
        "etp={etp} is the tensor-parallel degree inside experts; it may be 1 or tp={tp}",
    ),
    (
        "etp",
        "has_experts and etp == 1 and tp > 1 and not sequence_parallel",
        "etp=1 with tp={tp} needs sequence_parallel=true, with which each of the tp ranks sends its own tokens to the "
        "experts; or use etp={tp}",
    ),
    (
        "etp",
        "etp > 1 and etp == tp and expert_hidden_size % etp",
        "etp={etp} does not divide expert_hidden_size={expert_hidden_size} of {model}; use etp=1",
    ),
    (
        "etp",
        "etp > 1 and etp == tp and biased_outputs % etp",
        "etp={etp} does not divide the {biased_outputs} outputs of experts of {model}, and so not their biases; use "
        "etp=1",
    ),
    (
        "ep_ranks",
        "has_experts and (etp == 1 or etp == tp) and ep_ranks % ep",
        "ep={ep} does not divide the dp*cp*tp/etp = {dp}*{cp}*{tp}/{etp} = {ep_ranks} ranks available for "
        "expert parallelism; ep may be one of {divisors(ep_ranks)}",
    ),
    (
        "ep_shards",
        "has_experts and (etp == 1 or etp == tp) and ep_ranks % ep == 0 and ep_shards % ep and ep % ep_shards",
        "ep={ep} neither divides the dp_shard*cp*tp/etp = {ep_shards} ranks that share master weights nor is a "
        "multiple of them; ep may be one of {divisors(ep_shards)}",
    ),
    (
        "routing_imbalance",
        "routing != 'balanced' and has_experts and routing_imbalance > most_imbalance",
        "routing_imbalance={routing_imbalance} must be at most num_experts/experts_per_token = {most_imbalance}, the "
        "imbalance of an expert that every token visits",
    ),
    (
        "zero_shards",
        "zero_stage == 0 and dp_shard > 1",
        "zero_stage=0 shards nothing, but dp_shard={dp_shard}; use dp_replicate={dp} with dp_shard=1",
    ),
    (
        "zero_shards",
        "zero_stage > 0 and dp_shard * cp == 1",
        "zero_stage={zero_stage} with dp_shard=1 and cp=1 has nothing to shard over; use zero_stage=0",
    ),
    (
        "compile_split_backward",
        "compile == 'block' and splits_backward",
        "compile=block with pp_schedule={pp_schedule}: a compiled backward cannot defer weight gradients; use "
        "compile=none, or pp_schedule=1f1b, interleaved_1f1b or gpipe",
    ),
    *RECOMPUTE_CASES,
    *OFFLOAD_CASES,
    (
        "fusion_zero",
        "gradient_accumulation_fusion and zero_stage > 1 and dp_replicate > 1",
        "gradient_accumulation_fusion=true with zero_stage={zero_stage} and dp_replicate={dp_replicate}: shards are "
        "summed over replicas with the last micro-batch, and products write no sums for that; use dp_replicate=1, "
        "zero_stage=0 or 1, or gradient_accumulation_fusion=false",
    ),
    (
        "fusion_experts",
        "gradient_accumulation_fusion and zero_stage > 1 and has_experts",
        "gradient_accumulation_fusion=true with zero_stage={zero_stage} and {model}, which has experts: only models "
        "without experts have sums of every micro-batch; use zero_stage=0 or 1, or gradient_accumulation_fusion=false",
    ),
    (
        "compile_fusion",
        "gradient_accumulation_fusion and compile == 'block'",
        "compile=block with gradient_accumulation_fusion=true: a compiled backward returns gradients and cannot add "
        "them to sums; use compile=none, or gradient_accumulation_fusion=false",
    ),
    *UPDATE_CASES,
    *DOCUMENT_CASES,
    *FP8_CASES,
)

_CLUSTER = _rules(
    "cluster",
    (
        "single_node",
        "joined_devices == devices_per_node and world_size > devices_per_node",
        "{world_size} ranks (dp*cp*tp*pp = {dp}*{cp}*{tp}*{pp}) on cluster {cluster}, which is one node of "
        "{devices_per_node}; at most {devices_per_node}",
    ),
    (
        "tiers",
        "joined_devices > devices_per_node and world_size > joined_devices",
        "{world_size} ranks (dp*cp*tp*pp = {dp}*{cp}*{tp}*{pp}) on cluster {cluster}, whose outermost tier joins "
        "{joined_devices} devices; at most {joined_devices}",
    ),
    *ATTENTION_CASES,
    *OFFLOAD_CLUSTER_CASES,
    *CAPTURE_CASES,
    (
        "precision",
        "low_precision and precisions and rate_name not in precisions",
        "precision={precision}, but {device} has no {rate_name} matrix products; it has {precisions}",
    ),
)

LACKING = _rules(
    "engine",
    ("pp_stages", "modules_written", "multi-token modules (m in pp_stages={pp_stages}; {model} has none)"),
    (
        "pp_stages",
        "empty_stage",
        "a stage without anything (stage {empty_stage} of pp_stages={pp_stages}; stages of E or L alone do work)",
    ),
    (
        "cp_kind",
        "engine == 'ultrasweep' and special_attention and cp > 1 and cp_kind != 'ulysses'",
        "cp_kind={cp_kind} with the chunks or capped scores of {model} (cp_kind=ulysses works)",
    ),
    (
        "cp_kind",
        "engine == 'ultrasweep' and cp > 1 and cp_kind != 'ulysses' and longest_window > seq_len // cp_part + 1",
        "cp_kind={cp_kind} with a window of {longest_window} tokens in {model}, which reaches past a part of "
        "seq_len/(2*cp) = {seq_len // cp_part} tokens (cp_kind=ulysses or a smaller cp works)",
    ),
    (
        "documents",
        "engine == 'ultrasweep' and documents and cp > 1 and cp_kind == 'ring'",
        "cp_kind={cp_kind} with documents (cp_kind=allgather and ulysses work)",
    ),
    (
        "attention",
        "engine == 'ultrasweep' and local_attention and attention not in ('auto', 'flash')",
        "attention={attention} with the windows or capped scores of {model} (auto and flash work)",
    ),
    *UPDATES_LACKING,
)
"""Features that a valid layout may use but this version of the engine cannot run yet. The messages of the rules that
apply form the name ``lacking``, which the rule ``engine_support`` lists."""

RULES = (
    *_LAYOUT,
    *_CLUSTER,
    *_rules("engine", ("engine_support", "lacking", "engine version {engine_version} cannot run {lacking} yet")),
)
"""All rules, in the order in which their sentences are shown."""

_SUPPORTED = RULES[-1]
"""The rule that lists what the engine lacks; it is broken if any rule of `LACKING` is."""
_STATED = RULES[:-1]
_tests_of_layout = compile_tests(LAYOUT_NAMES, DERIVED, [rule.broken for rule in _LAYOUT], FUNCTIONS)
_tests_of_all = compile_tests(
    (*LAYOUT_NAMES, *CLUSTER_NAMES), DERIVED, [rule.broken for rule in (*_STATED, *LACKING)], FUNCTIONS
)


def violations(experiment: Experiment, cluster: ClusterSpec) -> list[Violation]:
    """Every rule that the experiment breaks on this cluster; empty if it can run."""
    values = (*layout_values(experiment), *cluster_values(cluster))
    held = _tests_of_all(*values)
    others = [Violation(_SUPPORTED.name, sentence) for sentence in refused(experiment, cluster.backend)]
    if not held:
        return others
    broken = [_STATED[at] for at in held if at < len(_STATED)]
    if held[-1] >= len(_STATED):
        broken.append(_SUPPORTED)
    names = _named(values)
    return [*(Violation(rule.name, rule.message.fill(names)) for rule in broken), *others]


def layout_violations(experiment: Experiment) -> list[Violation]:
    """The rules of scope ``layout`` that the experiment breaks, on any cluster. Whether this engine can run it is not
    checked."""
    values = layout_values(experiment)
    held = _tests_of_layout(*values)
    if not held:
        return []
    names = _with_derived(dict(zip(LAYOUT_NAMES, values, strict=True)))
    return [Violation(_LAYOUT[at].name, _LAYOUT[at].message.fill(names)) for at in held]


def lacking(experiment: Experiment) -> list[str]:
    """Features of an experiment that this version of the engine cannot run, one phrase each; empty if it can run it."""
    return _lacking(_with_derived(dict(zip(LAYOUT_NAMES, layout_values(experiment), strict=True))))


def _lacking(names: Mapping[str, Any]) -> list[str]:
    return [rule.message.fill(names) for rule in LACKING if rule.broken.evaluate(names)]


def names_of(experiment: Experiment, cluster: ClusterSpec) -> dict[str, Any]:
    """Values that a rule may read, by name: fields of experiment, model and cluster, `DERIVED` and ``lacking``."""
    return _named((*layout_values(experiment), *cluster_values(cluster)))


def _named(values: tuple[Any, ...]) -> dict[str, Any]:
    names = _with_derived(dict(zip((*LAYOUT_NAMES, *CLUSTER_NAMES), values, strict=True)))
    names["lacking"] = _lacking(names)
    return names


def _with_derived(names: dict[str, Any]) -> dict[str, Any]:
    for name, derived in DERIVED.items():
        names[name] = derived.evaluate(names)
    return names
