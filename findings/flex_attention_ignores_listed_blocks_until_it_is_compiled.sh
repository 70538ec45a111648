#!/usr/bin/env bash
# torch 2.13.0, CPU. FlexAttention that is not compiled attends to blocks that the mask does not list; compiled, it does not.
#
# Expected: `BlockMask.from_kv_blocks(number, which)` is the mask: queries attend to the blocks of keys that are listed for them.
# `flex_attention` gives the same numbers compiled and not, but for rounding; what is not compiled is the reference in a test.
# Behaviour: compiled, the lists decide. Not compiled, nothing reads them: only `mask_mod` is applied, to all keys, and without
# one the attention is full attention. The mask still prints its blocks and its sparsity. A mask of `create_block_mask` has both,
# and both ways agree; lists of one's own (top-k blocks of a router, a fixed pattern) are lists alone. So a test of a compiled
# layer against the plain one fails for no fault of the layer, and one of two plain layers passes with a model that sees all.
# It can also happen in the course of a run: torch.compile stops compiling after some shapes (here two), with a line in the log,
# and attention is full from there on. The loss changes and no error comes. `mask_mod` has to repeat what the lists say.
# Who meets it: block-sparse attention (MoBA, top-k blocks) on FlexAttention, with several lengths or in a debugger.
#
# Output of 2026-11-30 (four blocks, each listed for itself alone; then one length after another):
#   from_kv_blocks (75 % sparse): compiled the listed blocks; not compiled all blocks
#   from_kv_blocks, causal mask_mod (75 % sparse): compiled what is before in the listed blocks; not compiled what is before in all blocks
#   create_block_mask (75 % sparse): compiled the listed blocks; not compiled the listed blocks
#   length 640, with two compilations allowed: the listed blocks
#   length 768, with two compilations allowed: the listed blocks
#   length 896, with two compilations allowed: all blocks
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/masks.py" <<'PYTHON'
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

BLOCK, WIDTH = 128, 32


def own(batch, head, query, key):
    return query // BLOCK == key // BLOCK


def is_causal(batch, head, query, key):
    return query >= key


def listed(blocks, mask_mod=None):
    """Each block of queries attends to the block of keys with its number, and to no other."""
    number = torch.ones(1, 1, blocks, dtype=torch.int32)
    which = torch.arange(blocks, dtype=torch.int32).view(1, 1, blocks, 1).expand(1, 1, blocks, blocks).contiguous()
    return BlockMask.from_kv_blocks(number, which, BLOCK_SIZE=BLOCK, mask_mod=mask_mod)


def attended(attention, mask, blocks):
    """What the result is attention to."""
    length = blocks * BLOCK
    q, k, v = torch.randn(3, 1, 2, length, WIDTH, generator=torch.Generator().manual_seed(0))
    found = attention(q, k, v, block_mask=mask)
    at = torch.arange(length)
    same, before = at[:, None] // BLOCK == at // BLOCK, at[:, None] >= at
    masks = {
        "the listed blocks": same,
        "what is before in the listed blocks": same & before,
        "all blocks": torch.ones(length, length, dtype=torch.bool),
        "what is before in all blocks": before,
    }
    for name, allowed in masks.items():
        if torch.allclose(found, F.scaled_dot_product_attention(q, k, v, attn_mask=allowed), atol=1e-4):
            return name
    return "something else"


compiled = torch.compile(flex_attention)
for name, mask in (
    ("from_kv_blocks", listed(4)),
    ("from_kv_blocks, causal mask_mod", listed(4, is_causal)),
    ("create_block_mask", create_block_mask(own, None, None, 4 * BLOCK, 4 * BLOCK, device="cpu")),
):
    both = f"compiled {attended(compiled, mask, 4)}; not compiled {attended(flex_attention, mask, 4)}"
    print(f"{name} ({mask.sparsity():.0f} % sparse): {both}", flush=True)
torch._dynamo.reset()
torch._dynamo.config.recompile_limit = 2
static = torch.compile(flex_attention, dynamic=False)
for blocks in (5, 6, 7):
    print(f"length {blocks * BLOCK}, with two compilations allowed: {attended(static, listed(blocks), blocks)}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/masks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
from_kv_blocks (75 % sparse): compiled the listed blocks; not compiled all blocks
from_kv_blocks, causal mask_mod (75 % sparse): compiled what is before in the listed blocks; not compiled what is before in all blocks
create_block_mask (75 % sparse): compiled the listed blocks; not compiled the listed blocks
length 640, with two compilations allowed: the listed blocks
length 768, with two compilations allowed: the listed blocks
length 896, with two compilations allowed: all blocks
EXPECTED
