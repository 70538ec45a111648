"""Meaning of the words in a table's cells: sharding, recomputation, precision, attention kernel, yes and no.

A cell is understood as a whole or not at all: a word that stands inside another one (``fsdp`` in ``no fsdp``) has no
meaning of its own. What is not understood raises `Refused`, which names the words that are.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from workloads.predict.points import fp8_kind
from workloads.spec.recomputation import SELECTIVE, operations_of

_UNKNOWN = ("", "nan", "none", "null", "na", "n/a", "unknown", "?", "-")


class Refused(Exception):
    """Reason why a row cannot be predicted, in words."""


class Recomputed(NamedTuple):
    kind: float
    """Index in `workloads.predict.points.RECOMPUTE`."""
    share: float
    """Share of the layers that recompute."""
    again: float
    """`Points.again`: host work for it, relative to all operations of ``selective`` or ``full`` in every layer."""


def text_of(value: Any) -> str:
    """Text of a cell; empty if the cell says that its value is unknown."""
    text = word_of(value)
    return "" if text in _UNKNOWN else str(value).strip()


def word_of(value: Any) -> str:
    """Text of a cell in lower case. ``none`` is a word here; an empty cell gives an empty string."""
    if value is None or (isinstance(value, float) and value != value) or str(value) == "<NA>":
        return ""
    return str(value).strip().lower()


def truth_of(column: str, value: Any) -> bool | None:
    """Whether a cell says yes; None if it is empty."""
    text = text_of(value).lower()
    if text in ("true", "1", "1.0", "yes", "y", "t", "on"):
        return True
    if text in ("false", "0", "0.0", "no", "n", "f", "off"):
        return False
    if text:
        raise Refused(f"{column} = {text!r} is neither true nor false")
    return None


def _plain(text: str) -> str:
    """A text with one space for each run of punctuation, so that ``ZeRO-3`` and ``zero_3`` become equal."""
    return re.sub(r"[^a-z0-9.]+", " ", text.lower()).strip()


_OFF = r"(?:none|no|not|off|false|without|disabled?|0|0\.0)"
_ON = r"(?:on|true|yes|enabled?)"
_FSDP = r"(?:(?:py)?torch )?(?:megatron |m)?fsdp[12]?"
_OPTIMIZER = r"(?:megatron )?(?:use )?(?:distributed|dist|sharded) ?(?:optimi[sz]er|opt)"
_SHARDING: tuple[tuple[str, int], ...] = (
    (rf"{_OFF}|ddp|(?:distributed )?data parallel|dp|replicated?|no shard", 0),
    (rf"{_OFF} (?:{_FSDP}|{_OPTIMIZER}|zero|shard(?:ing|ed)?)|(?:{_FSDP}|{_OPTIMIZER}|zero|sharding) {_OFF}", 0),
    (rf"{_FSDP} no shard", 0),
    (rf"{_OPTIMIZER}(?: {_ON})?", 1),
    (rf"(?:{_FSDP} )?shard grad op", 2),
    (rf"{_FSDP}(?: {_ON})?|(?:{_FSDP} )?full shard|{_FSDP} (?:[2-9]|[1-9][0-9]+)", 3),
    (rf"(?:{_FSDP} )?(?:hsdp|hybrid shard)", 3),
)
"""Patterns of the words for a ZeRO stage. ``fsdp=8`` is a degree; ``fsdp=1`` may be a switch or a degree, so it is
not understood."""
_STAGE = rf"(?:(?:deepspeed|ds|{_FSDP}) )?(?:zero(?: stage)?|stage) ?([0-3])|([0-3])(?:\.0)?"


def zero_of(value: Any, default: int, note: list[str]) -> float:
    """ZeRO stage of a ``sharding`` cell. ``default``: stage of an empty cell."""
    text = word_of(value)
    if not text:
        note.append(f"sharding not given: zero{default}")
        return float(default)
    plain = _plain(text)
    if stage := re.fullmatch(_STAGE, plain):
        return float(stage[1] or stage[2])
    for pattern, number in _SHARDING:
        if re.fullmatch(pattern, plain):
            if re.search("hsdp|hybrid", plain):
                note.append(f"sharding {text!r}: taken as zero3 over all data-parallel ranks")
            return float(number)
    raise Refused(
        f"sharding {text!r} is not known; known: zero0 to zero3, none, ddp, distributed optimizer, fsdp, hsdp"
    )


_CHECKPOINTING = r"(?:(?:activation|gradient|grad|act)s? )?(?:checkpoint(?:ing|s)?|re(?:comput\w+)|remat\w*|ac|ckpt)"
_PART = (
    r"norm|layernorm|layer norm|rmsnorm|rope|swiglu|activation|core attn|core attention|attn|attention|mlp|moe|moe act|"
    r"experts?|routed experts?|shared experts?|mla up|mla up proj|up proj"
)
_NO_RECOMPUTE = rf"(?:{_OFF}|never)(?: {_CHECKPOINTING})?|{_CHECKPOINTING} {_OFF}"
_FULL = (
    rf"full(?: (?:block|uniform|layers?))?(?: {_CHECKPOINTING})?|block|uniform|all(?: layers)?|every layer|"
    rf"{_ON}|1|1\.0|{_CHECKPOINTING}(?: {_ON})?|{_CHECKPOINTING} full"
)
_SOME = (
    rf"(?:selective|sel|sac|partial)(?: {_CHECKPOINTING})?(?: (?:{_PART}))*|{_CHECKPOINTING} selective|"
    rf"(?:{_PART})(?: (?:and )?(?:{_PART}))*"
)


_SEQUENCE_PARALLEL = re.compile(r"[,+&]? *(?:and |with |(without |no ))?(?:sp|sequence[ -]parallel\w*)$")
"""What tables write beside recomputation (`sequence_parallel_of`)."""


def sequence_parallel_of(value: Any, recompute: Any) -> bool | None:
    """Whether tensor parallelism of a row has sequence parallelism, from its cells ``sequence_parallel`` and
    ``recompute`` (``full, no SP``); None: neither says it."""
    said = truth_of("sequence_parallel", value)
    beside = _SEQUENCE_PARALLEL.search(word_of(recompute))
    if beside is None:
        return said
    if said is not None and said == bool(beside[1]):
        raise Refused(f"sequence_parallel is {str(said).lower()}, but recompute is {text_of(recompute)!r}")
    return not beside[1]


def recomputed_of(value: Any, note: list[str]) -> Recomputed:
    """Recomputation of a cell such as ``full``, ``norm+swiglu`` or ``full.every2`` (every second layer)."""
    text = word_of(value)
    if not text:
        note.append("recompute not given: none")
        return Recomputed(0.0, 1.0, 1.0)
    if beside := _SEQUENCE_PARALLEL.search(text):
        text = text[: beside.start()].strip()
    word, _, every = text.partition(".every")
    plain = _plain(word)
    kind = next((i for i, known in enumerate((_NO_RECOMPUTE, _SOME, _FULL)) if re.fullmatch(known, plain)), None)
    if kind is None or (".every" in text and not re.fullmatch(r"[1-9]\d*", every)):
        raise Refused(
            f"recompute {text!r} is not known; known: none, selective, full, operations such as norm+swiglu, each also "
            "with .every2 (every second layer)"
        )
    share = 1.0 / int(every) if every else 1.0
    named = len(operations_of(word)) or len(SELECTIVE)
    return Recomputed(float(kind), share, share * named / len(SELECTIVE))


_SIXTEEN = {"bf16", "bfloat16", "fp16", "float16", "half", "16", "16bit", "16bits", "amp", "mixed", "o1", "o2"}
_LOW = {"fp8", "float8", "e4m3", "e5m2", "mxfp8", "nvfp4"}
_FOUR = {"fp4", "mxfp4", "float4", "e2m1"}
_WIDE = {"fp32", "float32", "tf32", "fp64", "float64", "32", "64"}
_BESIDE = {
    *("precision", "true", "bit", "bits", "with", "and", "in", "te", "training", "gemm", "gemms", "hybrid", "recipe"),
    *("tensor", "tensorwise", "row", "rowwise", "block", "blockwise", "axis", "axiswise", "channel", "subchannel"),
    *("per", "wise", "scaling", "scale", "scales", "scaled", "delayed", "current", "dynamic", "cs", "ds", "mx", "sc"),
    *("accumulate", "accumulation", "grads", "gradients", "reduce", "master", "weights", "optimizer"),
}
"""Words that may stand beside the name of a number format."""


class Precision(NamedTuple):
    fp8: float
    """`workloads.predict.points.fp8_kind`."""
    fp16: float
    """1: the 16-bit products are in fp16."""


def precision_of(value: Any, note: list[str]) -> Precision:
    """Precision of the matrix products of a cell."""
    text = text_of(value).lower()
    if not text:
        note.append("precision not given: 16 bits")
        return Precision(0.0, 0.0)
    words = set(_plain(text.rstrip("?")).split())
    if words & _FOUR:
        raise Refused(f"precision {text!r}: of 4 bits only nvfp4 has known rates; known: 16 bits, fp8, mxfp8")
    unknown = words - _SIXTEEN - _LOW - _WIDE - _BESIDE
    if unknown or not words & (_SIXTEEN | _LOW | _WIDE):
        raise Refused(
            f"precision {text!r} is not known; known: bf16, fp16, mixed, fp8 (tensorwise, rowwise, blockwise), "
            "mxfp8, nvfp4"
        )
    if not words & (_SIXTEEN | _LOW):
        raise Refused(f"precision {text!r} is not supported; supported: 16 bits, fp8, mxfp8, nvfp4")
    if text.endswith("?"):
        note.append(f"precision {text!r} is not certain: taken as {text.rstrip('?')}")
    kind = fp8_kind(f"fp8 {text}") if words & _LOW else 0.0
    return Precision(kind, float(not kind and bool(words & {"fp16", "float16", "half"})))


FLASH2_ON_HOPPER = 0.36
"""Share of peak of FlashAttention-2 on H100, forward and backward: 308 TFLOP/s of 989 at 8,192 tokens, 328 at 16,384
(as in the profile of nanotron)."""
_KERNELS: tuple[tuple[str, str], ...] = (
    (r"(?:unfused|eager|math|naive|local)(?: attention)?", "unfused"),
    (r"(?:flash ?(?:attention|attn)? ?2|fa ?2)", "flash2"),
    (r"(?:flash ?(?:attention|attn)? ?[34]|fa ?[34]|cudnn|fused|te)(?: attention)?", "newest"),
    (r"flash ?(?:attention|attn)?|sdpa|auto|efficient|xformers|memory efficient", "flash"),
)


def kernel_of(value: Any) -> str:
    """Kind of an attention kernel: ``unfused`` (scores in memory), ``flash2``, ``newest`` (FlashAttention-3 and later,
    cuDNN), ``flash`` (of an unnamed version), or empty for an empty cell."""
    text = text_of(value).lower()
    if not text:
        return ""
    for pattern, kind in _KERNELS:
        if re.fullmatch(pattern, _plain(text)):
            return kind
    raise Refused(f"attention_kernel {text!r} is not known; known: flash, flash2, flash3, cudnn, fused, unfused")


def learned_of(value: Any) -> bool:
    """Whether a ``routing`` cell says that the router chooses the experts of a token; an empty one does not."""
    text = _plain(text_of(value))
    if text in ("", "balanced", "forced", "forced balance"):
        return False
    if text in ("learned", "natural"):
        return True
    raise Refused(f"routing {text!r} is not known; known: balanced, learned")


def dispatched_of(value: Any) -> bool | None:
    """Whether a ``dispatcher`` cell says that a token goes once to each rank, not once to each expert; None if it is
    empty."""
    text = _plain(text_of(value))
    if text in ("deepep", "hybridep", "deep ep", "hybrid ep", "flex"):
        return True
    if text in ("alltoall", "all to all", "a2a", "nccl"):
        return False
    if text:
        raise Refused(f"dispatcher {text!r} is not known; known: alltoall, deepep, hybridep")
    return None
