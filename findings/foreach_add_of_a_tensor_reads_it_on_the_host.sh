#!/usr/bin/env bash
# torch 2.13.0. `torch._foreach_add_(tensors, number)` with the number in a 0-dim tensor reads that tensor on the host.
#
# Expected: a 0-dim tensor is added as a tensor, as `torch._foreach_mul_` and `tensor.add_` do it; nothing waits.
# Behaviour: the call is matched with the overload for Python numbers, and the tensor becomes a number by `.item()`: on a GPU
# the host waits for all work before it, and a step that is captured as a CUDA graph is refused. `alpha=1` or the overload by
# its name, `torch.ops.aten._foreach_add_.Tensor`, adds the tensor without reading it. `_foreach_mul_` finds the right overload.
# Who meets it: optimizers whose step count lives on the device and stands still when fp16 skips a step.
#
# Output of 2026-11-28:
#   _foreach_add_(xs, y): _local_scalar_dense.default _foreach_add_.Scalar
#   _foreach_add_(xs, y, alpha=1): _foreach_add_.Tensor
#   _foreach_mul_(xs, y): _foreach_mul_.Tensor
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/add.py" <<'PYTHON'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", []), str(operator).removeprefix("aten.")]
        return operator(*args, **(kwargs or {}))


xs, y = [torch.zeros(()) for _ in range(2)], torch.tensor(1.0)
for name, call in {
    "_foreach_add_(xs, y)": lambda: torch._foreach_add_(xs, y),
    "_foreach_add_(xs, y, alpha=1)": lambda: torch._foreach_add_(xs, y, alpha=1),
    "_foreach_mul_(xs, y)": lambda: torch._foreach_mul_(xs, y),
}.items():
    with Operators() as operators:
        call()
    print(f"{name}:", *operators.seen)
PYTHON
"$folder/venv/bin/python" "$folder/add.py" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
_foreach_add_(xs, y): _local_scalar_dense.default _foreach_add_.Scalar
_foreach_add_(xs, y, alpha=1): _foreach_add_.Tensor
_foreach_mul_(xs, y): _foreach_mul_.Tensor
EXPECTED
