#!/usr/bin/env bash
# torch 2.13.0. Under FakeTensorMode a storage that `set_` was given is never freed, while its tensors are.
#
# Expected: fake tensors end like real ones. Who counts the storages that exist, as estimators of memory on FakeTensors do, sees a
# tensor's storage end with the last tensor on it.
# Behaviour: the mode caches what an operation does by its arguments. A storage among them (`Tensor.set_` with a storage, an offset, a
# size and a stride) is part of the cache's key, and stays for as long as the mode does. `set_` with a tensor, `as_strided` and real
# tensors have no such effect, nor has a mode without its cache.
# Who meets it: memory that is estimated on FakeTensors, of programs that rebuild tensors from storages:
# the estimate grows with every micro-batch, and no tensor that is alive explains it.
#
# Output of 2026-12-01 (whether the storage still exists when both tensors on it are gone: real, fake, fake without its cache):
#   set_ with a storage: no, yes, no
#   set_ with a tensor: no, no, no
#   as_strided: no, no, no
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/left.py" <<'PYTHON'
import gc
import weakref
from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

WAYS = {
    "set_ with a storage": lambda one: torch.empty(0).set_(one.untyped_storage(), 0, (1024,), (1,)),
    "set_ with a tensor": lambda one: torch.empty(0).set_(one),
    "as_strided": lambda one: one.as_strided((1024,), (1,)),
}


def without_cache():
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


def is_left(way, mode):
    with mode:
        first = torch.ones(1024)
        storage = weakref.ref(first.untyped_storage())
        second = way(first)
        del first, second
        gc.collect()
        return "yes" if storage() is not None else "no"


for name, way in WAYS.items():
    print(f"{name}: {', '.join(is_left(way, mode) for mode in (nullcontext(), FakeTensorMode(), without_cache()))}")
PYTHON
"$folder/venv/bin/python" "$folder/left.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
set_ with a storage: no, yes, no
set_ with a tensor: no, no, no
as_strided: no, no, no
EXPECTED
