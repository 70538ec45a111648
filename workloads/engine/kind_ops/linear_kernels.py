"""The kernels of flash-linear-attention (package ``fla-core``, in Triton) for ``recurrence=fla``.

Kernels are compiled, and their block sizes and warps chosen by timing, at the first call of a shape other than its
length, which takes a minute or two; Triton keeps the choice on disk. Functions are the package's public ones, except
for one attribute (see `allow_wide_keys`), so the release is pinned.
"""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch
from torch import Tensor

from workloads.spec.recurrent_kernels import PACKAGE, RELEASE

_chosen = False


def choose_kernels(*, chosen: bool) -> None:
    """Run recurrences on CUDA with the package's kernels from now on (see `unusable`), or with the plain formulas."""
    global _chosen
    _chosen = chosen


def kernels_chosen(x: Tensor) -> bool:
    """Whether the kernels compute an operation on ``x``, or would on a GPU (FakeTensors, whose device is any)."""
    return _chosen and x.dtype in (torch.bfloat16, torch.float16)


def unusable(key_sizes: tuple[int, ...]) -> str | None:
    """Why the kernels cannot run in this process: the package's release, Triton, or the device; None if they can.
    ``key_sizes``: sizes of keys of the layers whose decay is one number for each head."""
    installed = _installed(PACKAGE)
    if installed != RELEASE:
        here = f"{installed} is installed" if installed else "it is not installed"
        return f"it needs the package {PACKAGE} {RELEASE}, and {here}: pip install 'ultrasweep[recurrent]'"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"it needs an Ampere GPU or a newer one, not {torch.cuda.get_device_name()}"
    narrow = [size for size in key_sizes if 32 < size <= 64]
    if narrow and _miscompiles():
        return (
            f"Triton {_installed('triton')} compiles its backward for keys of {narrow[0]} wrongly on Hopper GPUs (from "
            "33 to 64; flash-linear-attention's issue 640); Triton 3.7.1 does not"
        )
    return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _miscompiles() -> bool:
    """Whether Triton is one of those that compile the package's ``chunk_bwd_kernel_dqkwg`` wrongly with blocks of 64
    channels of keys: 3.4.0 up to 3.7.1, on Hopper (github.com/fla-org/flash-linear-attention/issues/640)."""
    found = tuple(int(part) for part in (_installed("triton") or "0").split("+")[0].split(".")[:3])
    return (3, 4, 0) <= found < (3, 7, 1) and torch.cuda.get_device_capability()[0] == 9


@lru_cache(maxsize=1)
def functions() -> SimpleNamespace:
    """The package's functions. Its own choice among other packages' kernels (tilelang, flash_qla) is off, so that the
    same ones run wherever it is installed."""
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # read when the package is imported
    allow_wide_keys()
    return SimpleNamespace(
        convolution=importlib.import_module("fla.modules.causal_conv1d").causal_conv1d,
        gated_delta_rule=importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule,
        kimi_delta=importlib.import_module("fla.ops.kda").chunk_kda,
        one_decay=importlib.import_module("fla.ops.simple_gla").chunk_simple_gla,
        norm_before_gate=importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated,
        gate_before_norm=importlib.import_module("fla.modules.norm.layernorm_gated").rmsnorm_fn,
    )


def allow_wide_keys() -> None:
    """The package refuses every size of keys on Hopper GPUs under the releases of Triton in `_miscompiles`, although
    only blocks of 64 channels are compiled wrongly: other sizes have blocks of 16, 32 or 128 there (the issue's table).
    `unusable` refuses what the package would have to."""
    module = importlib.import_module("fla.ops.common.chunk_o")
    module.TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]
