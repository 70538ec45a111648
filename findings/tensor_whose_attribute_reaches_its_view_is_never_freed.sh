#!/usr/bin/env bash
# torch 2.13.0. A tensor with an attribute that leads to a view of the tensor is never freed, not by the garbage collector either.
#
# Expected: a tensor, its attribute and what the attribute refers to are a circle like any other of Python objects, and
# `gc.collect()` frees it once nothing else refers to it, as it does where the attribute leads to the tensor itself.
# Behaviour: a view holds its base in C++ (`_base`), where the garbage collector cannot look. With an attribute that
# leads to the tensor itself or to `detach()` of it (which has no base) the circle is freed; with one that leads to
# `view(-1)` of it the memory stays until the process ends, without a word.
# It matters because FSDP2 looks for its extension points as attributes of the local tensor of a parameter
# (`fsdp_pre_all_gather`), and the natural thing for such a function to keep is a flat view of the shard: every model that
# is made and dropped then leaves its whole shard behind. `new_empty(0).set_(storage, ...)` gives the same memory without a
# base.
#
# Output of 2026-11-28:
#   the tensor itself: freed
#   its detach(): freed
#   its view(-1): not freed, holds a base
#   its storage in another tensor: freed
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/circle.py" <<'PYTHON'
import gc
import weakref

import torch


class Kept:
    """Something that a weak reference can watch, held by the attribute alone."""


def keep(tensor, same):
    """Give a tensor an attribute that reaches ``same``; a weak reference to what else the attribute holds."""
    kept = Kept()
    tensor.fsdp_pre_all_gather = lambda: (kept, same)
    return weakref.ref(kept)


def is_left(same_memory):
    tensor = torch.zeros(1000)
    reference = keep(tensor, same_memory(tensor))
    del tensor
    gc.collect()
    return reference() is not None


def told(name, same_memory):
    base = ", holds a base" if same_memory(torch.zeros(3))._base is not None else ""
    print(f"{name}: {'not freed' if is_left(same_memory) else 'freed'}{base}")


told("the tensor itself", lambda tensor: tensor)
told("its detach()", lambda tensor: tensor.detach())
told("its view(-1)", lambda tensor: tensor.view(-1))
told(
    "its storage in another tensor",
    lambda tensor: tensor.new_empty(0).set_(tensor.untyped_storage(), 0, tensor.size(), tensor.stride()),
)
PYTHON
"$folder/venv/bin/python" "$folder/circle.py" 2>"$folder/errors" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
the tensor itself: freed
its detach(): freed
its view(-1): not freed, holds a base
its storage in another tensor: freed
EXPECTED
