#!/usr/bin/env bash
# torch 2.13.0, CPU. A compiled function runs uncompiled under a TorchDispatchMode, without a word, and compiled
# FlexAttention does not run at all.
#
# Expected: a mode that passes every operation on (to count traffic, FLOPs or memory) leaves compiled functions as they are;
# it sees their kernels or nothing.
# Behaviour: what was compiled before the mode began runs its operations one by one inside it: all of them reach the mode.
# flex_attention, which is a higher-order operator when it is not compiled, raises NotImplementedError.
# So a watched step is neither the step that is timed nor, with FlexAttention, a step at all.
# Who meets it: whoever counts a step of a compiled model, or of one with FlexAttention (packed documents, soft caps, sinks).
#
# Output of 2026-11-29:
#   a compiled chain of 4 operations: the mode sees 4
#   flex_attention compiled: [1, 2, 256, 32]
#   flex_attention compiled, under the mode: NotImplementedError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/watched.py" <<'PYTHON'
import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

warnings.filterwarnings("ignore")


class Count(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Count.seen += 1
        return func(*args, **(kwargs or {}))


@torch.compile
def chain(x):
    return (x.sin() + 1).cos() * 2


attention = torch.compile(flex_attention)
x = torch.randn(1, 2, 256, 32)
with torch.no_grad():
    chain(x)
    with Count():
        chain(x)
    of_chain = Count.seen
    print("a compiled chain of 4 operations: the mode sees", of_chain)
    print("flex_attention compiled:", list(attention(x, x, x).shape))
    with Count():
        try:
            found = list(attention(x, x, x).shape)
        except NotImplementedError as error:
            found = type(error).__name__
        print("flex_attention compiled, under the mode:", found)
if (of_chain, found) != (4, "NotImplementedError"):
    raise SystemExit("torch behaves otherwise now")
PYTHON
"$folder/venv/bin/python" "$folder/watched.py"
