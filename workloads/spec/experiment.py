"""Describes one experiment: its fields, its id and its JSON form. No torch here.

Everything that can change a measured number is a field, and every field goes into the hash, including defaults (except
fields of `LATER_FIELDS` at their defaults). Settings that cannot change a number (paths, partitions, how many steps are
timed) are not fields. The id is for people and for joining tables; nothing parses it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from workloads.spec.canonical_fields import canonical_fields
from workloads.spec.checks import shown
from workloads.spec.documents.lengths import without_path
from workloads.spec.documents.loads import Packing, imbalance, mean_length, slowest_length
from workloads.spec.engine_versions import ENGINE as ENGINE
from workloads.spec.engine_versions import ENGINE_VERSION as ENGINE_VERSION
from workloads.spec.engine_versions import ENGINES as ENGINES
from workloads.spec.engine_versions import fuses_by_default, fusion_word
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment_id import new_id
from workloads.spec.experiment_values import (
    FIELDS,
    Attention,
    Compile,
    ContextKind,
    CudaGraph,
    DocumentBalance,
    OptimizerName,
    PipelineSchedule,
    PipelineSplit,
    Precision,
    Recurrence,
    Routing,
    StoredIn,
)
from workloads.spec.model_spec import ModelSpec, canonical_model, checked_model, model_to_dict
from workloads.spec.recomputation import Recompute, operations_of
from workloads.spec.updates.words import UPDATE_FIELDS, update_words

_fields_of = attrgetter(*FIELDS)


class _WithId:
    """Keeps the id of an experiment, which is a hash over all fields and is needed many times."""

    __slots__ = ("_id",)
    _id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(_WithId):
    """One training configuration. Degrees of 1 mean "off".

    ``world_size = dp_replicate * dp_shard * cp * tp * pp``. ``ep`` does not multiply the world size: expert-parallel
    ranks are taken from the data-parallel and context-parallel axes (with ``etp=1`` also from tensor parallelism).
    ``zero_stage`` 0 replicates (``dp_shard == 1``); 1, 2, 3 shard optimizer state, then gradients, then parameters over
    ``dp_shard * cp`` (with ``dp_replicate > 1`` this is HSDP).
    """

    model: ModelSpec
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    micro_batch_size: int = 1
    """Sequences in one forward pass of one data-parallel rank."""
    global_batch_size: int
    """Sequences in one optimizer step over all ranks."""
    seq_len: int = 4096
    zero_stage: int = 0
    recompute: Recompute = "none"
    """Tensors that backward recomputes (`workloads.engine.layers.recompute`): none, the outputs of some operations by
    their names joined by "+", those of all cheap ones (``selective``), or everything but a layer's input (``full``). Or
    such words of the stages of the pipeline (`workloads.spec.recomputation`)."""
    recompute_every: int = 1
    """Only layers whose index in the model is a multiple of this are recomputed. No effect with ``recompute=none``."""
    activation_offload: str = "none"
    """Tensors of a layer that wait for its backward in the memory of the host (`workloads.spec.activations.offload`):
    none, some by their names joined by "+", or ``all`` that recomputation keeps."""
    pp_schedule: PipelineSchedule = "none"
    """``none`` exactly when ``pp == 1``."""
    virtual_stages: int = 1
    """Number of model chunks held by one pipeline rank."""
    pp_split: PipelineSplit = "balanced"
    """How layers are assigned to stages (`workloads.costs.shape.partition`). No effect if ``pp == 1``."""
    pp_stages: str | None = None
    """The stages written out (`workloads.spec.pipeline_stages`), instead of ``pp_split``. No effect if ``pp == 1``."""
    cp_kind: ContextKind = "ring"
    """How context-parallel ranks exchange keys and values (`workloads.engine.collectives.context_parallel`), and which
    tokens they have. No effect if ``cp == 1``."""
    sequence_parallel: bool = True
    """Activations between tensor-parallel regions are sharded over tokens. No effect if ``tp == 1``."""
    precision: Precision = "bf16"
    """bf16: bf16 compute, fp32 master weights, gradients reduced and accumulated in fp32. fp16: the same, with a
    dynamic loss scale (`workloads.engine.training.loss_scale`). fp8_*: as bf16, except for the matrix products of the
    blocks (`workloads.engine.ops.fp8`). mxfp8, nvfp4: likewise, planned only."""
    attention: Attention = "auto"
    recurrence: Recurrence = "torch"
    """What computes recurrent layers: plain formulas in torch operations, or the kernels of flash-linear-attention (the
    package ``fla-core``; `workloads.engine.kind_ops.linear_kernels`). No effect without such layers."""
    compile: Compile = "none"
    cuda_graph: CudaGraph = "auto"
    """Whether a whole optimizer step is captured as one CUDA graph and replayed
    (`workloads.engine.training.captured_step`): ``none`` never, ``step`` always, ``auto`` where it can be. Losses and
    gradients are the same."""
    etp: int = 1
    """Tensor-parallel degree inside routed experts: ``tp``, or 1. With 1 each rank sends its own share of the tokens,
    and ``ep`` takes tensor-parallel ranks too."""
    routing: Routing = "balanced"
    """How experts are chosen for a token. ``balanced`` and ``skewed`` force a choice that depends on the token's
    position alone, so that runs are comparable; ``learned`` uses the router."""
    routing_imbalance: float = 1.0
    """Tokens of the most loaded expert, divided by the mean over the experts. ``skewed`` routing has this imbalance;
    for ``learned`` routing planner and rehearsal assume it (a real run routes as it learns)."""
    capacity_factor: float | None = None
    """Each expert takes at most this many times its mean share of a rank's tokens; the rest are dropped. None: no
    tokens are dropped. No effect unless routing is learned."""
    pad_vocab_to: int | None = None
    """Embedding and head have rows up to the next multiple of this number times ``tp``, as with Megatron-LM's
    ``--make-vocab-size-divisible-by``. None: as many as the vocabulary, which ``tp`` must then divide."""
    gradient_accumulation_fusion: bool = False
    """Products of weight gradients add to the fp32 sum over micro-batches themselves (Megatron-LM's option of this
    name), instead of a rounded gradient of each micro-batch. No effect with one micro-batch. `canonical` sets it where
    it can be and nothing was chosen."""
    grad_reduce: StoredIn = "fp32"
    """Number format in which gradients are summed over micro-batches while they are unsharded, and reduced over ranks.
    fp32 stands for the dtype of the master weights, which is fp64 with ``precision=fp64``; bf16 for
    `workloads.engine.training.data_parallel.reduce_dtype`. Reduced shards have the dtype of the master weights."""
    optimizer: OptimizerName = "adamw"
    """What updates the weights (`workloads.spec.updates.optimizer`)."""
    optimizer_states: StoredIn = "fp32"
    """Number format in which the optimizer keeps its states between two updates; fp32 stands for that of the update.
    bf16: updated in fp32 and rounded stochastically."""
    master_weights: StoredIn = "fp32"
    """Number format of the shards that the optimizer updates; fp32 is fp64 with ``precision=fp64``. bf16: there is no
    copy in fp32, and updated weights are rounded stochastically."""
    optimizer_offload: float = 0.0
    """Share of the optimizer's states, 0 to 1, that the memory of the host holds and its processors update."""
    documents: str | None = None
    """Lengths of the documents that are packed into sequences (`workloads.spec.documents.lengths`): a token attends to
    its own document alone, whose positions begin at 0. The last document of a sequence is cut at the sequence's end.
    None: every sequence is one document of ``seq_len`` tokens."""
    document_balance: DocumentBalance = "none"
    """How sequences are dealt over data-parallel ranks and micro-batches (`workloads.spec.documents.loads`), and their
    tokens over context-parallel ranks (`workloads.spec.documents.shares`). No effect without ``documents``."""
    seed: int = 42
    engine: str = ENGINE
    engine_version: str = ENGINE_VERSION

    def __post_init__(self) -> None:
        for (field, values), value in zip(FIELDS.items(), _fields_of(self), strict=True):
            if not values.accepts(value):
                raise InvalidExperiment(values.refusal(f"experiment on {self.model.name}: {field}", value))

    @property
    def dp(self) -> int:
        """Data-parallel degree: replicas times shards."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def recomputed_operations(self) -> tuple[str, ...]:
        """Operations that a recomputed layer runs again one by one, where all stages have one word; empty with ``none``
        and ``full``."""
        return operations_of(self.recompute)

    def compiles(self, *, routed: bool, recomputed: bool) -> bool:
        """Whether layers of a kind are compiled: with routed experts or without, recomputed or not.

        Routers, ring and all-gather attention break the graph, and so do windows, chunks, sinks and packed documents.
        Torch compiles nothing of a checkpoint that has a graph break, so recomputed layers of such a kind are not
        compiled.
        """
        breaks = routed or self.model.layers is not None or self.documents is not None
        breaks = breaks or (self.cp > 1 and self.cp_kind != "ulysses")
        return self.compile == "block" and not (breaks and recomputed and self.recompute != "none")

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline: every pipeline rank holds ``virtual_stages`` of them."""
        return self.pp * self.virtual_stages

    @property
    def sequences_per_round(self) -> int:
        """Sequences that all data-parallel ranks together process in one micro-batch."""
        return self.dp * self.micro_batch_size

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one optimizer step (gradient accumulation; they fill the pipeline if ``pp > 1``)."""
        return self.global_batch_size // self.sequences_per_round

    @property
    def fusion_word(self) -> str:
        """Word of a label for a choice of ``gradient_accumulation_fusion`` that is not the usual one."""
        by_default = fuses_by_default(
            engine=self.engine,
            version=self.engine_version,
            zero_stage=self.zero_stage,
            compile=self.compile,
            num_microbatches=self.num_microbatches,
        )
        return fusion_word(self.gradient_accumulation_fusion, by_default)

    @property
    def update_words(self) -> list[str]:
        """Words of a label for what is unusual in how weights are updated."""
        return update_words({name: getattr(self, name) for name in UPDATE_FIELDS})

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def packing(self) -> Packing | None:
        """What decides which documents a rank has; None without documents, and for batches that cannot be divided."""
        if self.documents is None:
            return None
        split = 1 if self.cp_kind == "ulysses" else self.cp
        batch = self.seq_len, self.global_batch_size, self.dp, self.micro_batch_size, split
        packing = Packing(self.documents, self.document_balance, *batch)
        return packing if packing.is_whole else None

    @property
    def attended_length(self) -> float:
        """Length of a sequence without documents whose tokens attend to as many as those of a step do on average:
        ``seq_len``, or less with ``documents``. FLOPs of attention are linear in it."""
        return self.seq_len if (packing := self.packing) is None else mean_length(packing)

    @property
    def slowest_length(self) -> float:
        """The same of equal micro-batches with which a step takes as long as with those of the slowest rank."""
        if (packing := self.packing) is None:
            return self.seq_len
        waiting = (self.pp - 1) / self.virtual_stages
        return slowest_length(packing, together=self.zero_stage >= 2 or self.ep > 1, waiting=waiting)

    @property
    def attention_imbalance(self) -> float | None:
        """FLOPs of attention that the most loaded rank waits for, divided by the mean over ranks; None without
        documents."""
        return None if (packing := self.packing) is None else imbalance(packing)

    @property
    def hash(self) -> str:
        """Eight hex digits over every field but the model's name and a file's path (neither can change a number).

        Fields of `LATER_FIELDS` are left out at their default, so that experiments keep the hashes they had before
        these fields existed.
        """
        fields = to_dict(self)
        fields["model"].pop("name")
        fields["documents"] = without_path(self.documents)
        for name, default in LATER_FIELDS.items():
            if fields[name] == default:
                fields.pop(name)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def id(self) -> str:
        """Readable slug and hash, safe as a file name, e.g. ``llama8b-dp4z3-tp2-mbs2-gbs64-s4096-1f3c9a0e``
        (`workloads.spec.experiment_id`)."""
        try:
            return self._id
        except AttributeError:
            object.__setattr__(self, "_id", new_id(_fields_by_name(self), self.fusion_word, self.hash))
            return self._id

    @classmethod
    def canonical(cls, *, dp: int | None = None, **fields: Any) -> Experiment:
        """Makes an experiment in which every field that has no effect has its one canonical value.

        ``dp`` (instead of ``dp_replicate``/``dp_shard``) becomes replicas for ZeRO 0 and shards otherwise. With one
        data- and context-parallel rank there is nothing to shard, so ZeRO becomes 0; with one stage there is no
        schedule. Recomputed operations are sorted; an engine without a version gets the newest. So one run has one id,
        however its fields are given. Raises `InvalidExperiment` for values that are never valid.
        """
        return cls(**canonical_fields(fields, dp))

    def replace(self, **changes: Any) -> Experiment:
        return dataclasses.replace(self, **changes)


_NAMES = tuple(field.name for field in dataclasses.fields(Experiment))
_values_of = attrgetter(*_NAMES)


def _fields_by_name(experiment: Experiment) -> dict[str, Any]:
    return dict(zip(_NAMES, _values_of(experiment), strict=True))


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """Plain nested dict of every field, ready for JSON."""
    plain = _fields_by_name(experiment)
    plain["model"] = model_to_dict(experiment.model)
    return plain


def layout_id(experiment: Experiment) -> str:
    """The id with seed 0 and the canonical model: equal for runs of one layout with different seeds."""
    return dataclasses.replace(experiment, seed=0, model=canonical_model(experiment.model)).id


def canonical_id(experiment: Experiment) -> str:
    """The id that a new experiment gets if it is equal to this one in all fields of its model that have an effect. A
    stored experiment may have another id, which its rows and files keep."""
    model = canonical_model(experiment.model)
    return experiment.id if model is experiment.model else dataclasses.replace(experiment, model=model).id


def from_dict(fields: dict[str, Any]) -> Experiment:
    """Inverse of `to_dict`. Raises `InvalidExperiment` for unknown or missing fields, so that an old file does not
    silently get new defaults. A model that was read before may stand in the place of its fields.

    Experiments of engine versions that had no choice in a matter get the field with the behaviour of those engines.
    """
    fields = {**LATER_FIELDS, **fields}
    if fields.get("engine") == ENGINE and fields.get("engine_version") in ("1", "2"):
        fields = {**_UNTIL_2, **fields}
    expected = {f.name for f in dataclasses.fields(Experiment)}
    if wrong := expected.symmetric_difference(fields):
        raise InvalidExperiment(f"stored experiment has unknown or missing fields: {', '.join(sorted(wrong))}")
    model = fields["model"]
    model = model if isinstance(model, ModelSpec) else checked_model("stored model", model)
    return Experiment(**{**fields, "model": model})


LATER_FIELDS: Mapping[str, Any] = {
    "recompute_every": 1,
    "etp": 1,
    "routing": "balanced",
    "routing_imbalance": 1.0,
    "capacity_factor": None,
    "pp_stages": None,
    "pad_vocab_to": None,
    "cuda_graph": "none",
    "gradient_accumulation_fusion": False,
    **UPDATE_FIELDS,
    "recurrence": "torch",
    "documents": None,
    "document_balance": "none",
    "activation_offload": "none",
}
"""Fields that were added later, each with the earlier behaviour: all layers were recomputed, or none; no experts
ran; no step was captured; AdamW updated weights, and all of it was in fp32 on the device; recurrent layers were torch
operations; a sequence was one document; activations stayed on the device."""
_UNTIL_2 = {"pp_split": "even", "cp_kind": "ring"}
"""Behaviour of engine versions 1 and 2 where later versions have a choice. (They had no context parallelism.)"""


def to_json(experiment: Experiment) -> str:
    return json.dumps(to_dict(experiment), indent=1, sort_keys=True)


def from_json(text: str) -> Experiment:
    """Inverse of `to_json`. Raises `InvalidExperiment` as `from_dict` does, and for text that is no JSON object."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidExperiment(f"stored experiment is not JSON: {shown(text)}") from None
    if not isinstance(fields, dict):
        raise InvalidExperiment(f"stored experiment is no mapping: {shown(text)}")
    return from_dict(fields)
