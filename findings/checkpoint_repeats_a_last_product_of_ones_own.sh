#!/usr/bin/env bash
# torch 2.13.0, CPU. Activation checkpointing that stops early repeats the last product of a block after all, unless the
# product is autograd's own.
#
# Expected: torch.utils.checkpoint (use_reentrant=False) ends its second forward with the last tensor that backward needs
# (`set_checkpoint_early_stop`, on by default), so a block that ends with a linear layer never repeats that layer's product:
# its inputs are there before it begins.
# Behaviour: that holds for torch.nn.functional.linear, whose node saves its inputs before it computes. A torch.autograd.Function
# and a torch.library.custom_op save theirs when their forward has returned, so the same product is computed a second time and
# thrown away, and so are collectives behind it in the same function.
# Who meets it: every layer that brings a product of its own (fp8, fused accumulation of weight gradients, tensor parallelism)
# at the end of a checkpointed block. A small function that saves the tensors and passes its input on, called before the
# product, spares it.
#
# Output of 2026-11-28:
#   torch.nn.functional.linear: 1 product forward, 1 + 0 again
#   autograd.Function: 1 product forward, 1 + 1 again
#   library.custom_op: 1 product forward, 1 + 1 again
#   autograd.Function behind one that saves: 1 product forward, 1 + 0 again
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/again.py" <<'PYTHON'
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

counts = {"first": 0, "last": 0}


counting = False


class Count(TorchDispatchMode):
    """Counts the products of a block: those of 16 columns are its first, those of 8 its last."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if counting and func._schema.name in ("aten::mm", "finding::product"):
            counts["first" if out.shape[1] == 16 else "last"] += 1
        return out


wide, narrow = torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


@torch.library.custom_op("finding::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    x, w = ctx.saved_tensors
    return grad @ w, grad.t() @ x


product.register_autograd(backward, setup_context=setup)


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Behind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.saved = x.grad_fn
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved.saved_tensors
        return grad @ w, grad.t() @ x


WAYS = {
    "torch.nn.functional.linear": F.linear,
    "autograd.Function": Own.apply,
    "library.custom_op": product,
    "autograd.Function behind one that saves": lambda x, w: Behind.apply(Saves.apply(x, w), w),
}
for name, last in WAYS.items():

    def block(x):
        global counting
        counting = True  # not the products of gradients
        try:
            return last(torch.relu(F.linear(x, wide)), narrow)
        finally:
            counting = False

    x = torch.randn(4, 8, requires_grad=True)
    counts.update(first=0, last=0)
    with Count():
        out = checkpoint(block, x, use_reentrant=False)
        forward = dict(counts)
        counts.update(first=0, last=0)
        out.sum().backward()
    print(f"{name}: {forward['last']} product forward, {counts['first']} + {counts['last']} again")
PYTHON
cd "$folder"
venv/bin/python again.py 2>errors | tee output
diff output - <<'EXPECTED'
torch.nn.functional.linear: 1 product forward, 1 + 0 again
autograd.Function: 1 product forward, 1 + 1 again
library.custom_op: 1 product forward, 1 + 1 again
autograd.Function behind one that saves: 1 product forward, 1 + 0 again
EXPECTED
