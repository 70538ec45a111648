"""The training engines that a user can choose, and the versions of each that have an adapter. No torch here.

The version of an external engine is that of its package, then ``+`` and the revision of the adapter, and last, where
rows of one package differ by what else is installed, ``with`` or ``without`` that other package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ENGINE = "ultrasweep"
ENGINE_VERSION = "7"
"""Raise this when the engine computes or stores something differently, so that old rows are not mistaken for new
ones."""
WITHOUT_TRANSFORMER_ENGINE = "0.16.1+1 without Transformer Engine"
"""Version of Megatron-Core for machines that cannot have Transformer Engine."""
ENGINE_VERSIONS: Mapping[str, tuple[str, ...]] = {
    ENGINE: (ENGINE_VERSION,),
    "torchtitan": ("0.2.2+2", "0.3.0+1"),
    "megatron": ("0.16.1+2 with Transformer Engine 2.11.0", WITHOUT_TRANSFORMER_ENGINE),
    "transformers": ("5.24.0+1 with accelerate 1.15.0",),
}
"""Versions that can be run, by engine. Without a choice, grids take the installed one of them
(`workloads.rules.installed_engines`), else the first."""
ENGINES: Mapping[str, str] = {engine: versions[0] for engine, versions in ENGINE_VERSIONS.items()}
"""Engines that a user can choose, with the version that is used if none is chosen."""


_PLAIN_BY_DEFAULT = ("1", "2", "3")
"""Versions of this engine whose steps were eager, and whose gradients were rounded before they were added, unless
something else was asked for."""
BEFORE_7 = (*_PLAIN_BY_DEFAULT, "4", "5", "6")
"""Versions of this engine in which a step's only micro-batch left its gradients to FSDP, SGD clipped in a pass of its
own, and torch operations surrounded the scan of Mamba-2."""


def capture_word(cuda_graph: str | None, engine: str | None, version: str | None) -> str:
    """Word of a label for a choice of ``cuda_graph`` that is not the usual one: ``graph`` or ``eager``; else empty."""
    if cuda_graph == "step":
        return "graph"
    usual = cuda_graph != "none" or engine != ENGINE or version in _PLAIN_BY_DEFAULT
    return "" if usual else "eager"


def can_fuse(*, engine: object, version: object, num_microbatches: float) -> bool:
    """Whether ``gradient_accumulation_fusion`` has an effect: in newer versions of this engine a product writes the sum
    of one micro-batch, too."""
    return num_microbatches > 1 or (engine == ENGINE and version not in BEFORE_7)


def fuses_by_default(
    *, engine: object, version: object, zero_stage: object, compile: object, num_microbatches: float
) -> bool:
    """Whether a layout has ``gradient_accumulation_fusion`` unless it is asked not to: wherever it has an effect."""
    able = engine == ENGINE and zero_stage in (0, 1) and compile == "none" and version not in _PLAIN_BY_DEFAULT
    return able and can_fuse(engine=engine, version=version, num_microbatches=num_microbatches)


def fusion_word(fusion: bool | None, by_default: bool) -> str:
    """Word of a label for a choice of ``gradient_accumulation_fusion`` that is not the usual one: ``fused`` or
    ``unfused``; else empty. ``by_default``: of `fuses_by_default`."""
    if fusion is None or fusion == by_default:
        return ""
    return "fused" if fusion else "unfused"


def limits_of(version: str) -> str:
    """The part of an engine's version that says what it ran without, such as ``without Transformer Engine``.

    It is empty for every other text: versions of other programs have words of their own.
    """
    found = re.fullmatch(r"\d\S* (without .+)", version)
    return found[1] if found else ""


def runs_with(version: str) -> str | None:
    """Version of Transformer Engine that an engine's version names; None if it runs without."""
    found = re.fullmatch(r"\d\S* with Transformer Engine (\d\S*)", version)
    return found[1] if found else None
