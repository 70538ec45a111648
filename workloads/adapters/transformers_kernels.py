"""The packages whose kernels compute recurrent layers of transformers: those of the point, and no others.

transformers takes such a package if it can be imported when the class of a model is, and torch operations otherwise. A
point says which: ``recurrence=fla`` flash-linear-attention for the gated delta rule, ``mamba_ssm`` mamba-ssm for
Mamba-2, both with causal-conv1d for the convolution; ``torch`` none of them. On a CPU, where none of them runs, all
compute the same in torch operations.
"""

from __future__ import annotations

import importlib
import sys

import torch

from workloads.rules.installed_packages import installed_version
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.recurrent_kernels import keys_with_one_decay

_CONVOLUTION = {"causal_conv1d": ("causal-conv1d", "1.7.0")}
KERNELS = {
    "torch": {},
    "fla": {"fla": ("fla-core", "0.6.0"), **_CONVOLUTION},
    "mamba_ssm": {"mamba_ssm": ("mamba-ssm", "2.3.2.post1"), **_CONVOLUTION},
}
"""By `recurrence`: (package, version) of every module that transformers then imports."""


def choose(e: Experiment, device: torch.device) -> None:
    """Let transformers find the modules of the point alone. Call it before the class of the model is imported. Raises
    `UnsupportedByEngine` for a package that is missing, or that has another version or cannot run here."""
    wanted = KERNELS[e.recurrence] if device.type == "cuda" else {}
    for module in {one for modules in KERNELS.values() for one in modules} - set(wanted):
        sys.modules[module] = None  # type: ignore[assignment]  # an import of it fails
    for module, (package, version) in wanted.items():
        if (installed := installed_version(package)) != version:
            here = f"{package} {installed} is installed" if installed else "it is not installed"
            raise UnsupportedByEngine(
                f"recurrence={e.recurrence} of transformers needs {package} {version}, and {here}"
            )
        if module == "fla":
            _check_delta_rule(e)
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UnsupportedByEngine(f"{package} cannot be imported: {error}") from None


def _check_delta_rule(e: Experiment) -> None:
    """flash-linear-attention refuses more sizes of keys on Hopper GPUs than Triton compiles wrongly there
    (`workloads.engine.kind_ops.linear_kernels`)."""
    from workloads.engine.kind_ops import linear_kernels

    if (reason := linear_kernels.unusable(keys_with_one_decay(e.model))) is not None:
        raise UnsupportedByEngine(f"recurrence=fla: {reason}")
    linear_kernels.allow_wide_keys()
