#!/usr/bin/env bash
# megatron-core 0.19.2. The package has Megatron-LM's training loop since 0.19, but not the Makefile that the loop starts with.
#
# Expected: `megatron.training.pretrain`, installed with `pip install megatron-core`, trains; what it compiles in C++ at its
# start comes compiled with the wheel (`helpers_cpp.cpython-312-x86_64-linux-gnu.so`), as it does.
# Behaviour: `initialize_megatron` runs `make -C .../site-packages/megatron/core/datasets` on rank 0, whether the library is
# there or not. The folder has no Makefile, so rank 0 exits with status 1 and the message "Failed to compile the C++ dataset
# helper functions", which looks like a missing compiler, while the other ranks wait for it in a barrier. An empty rule in a
# Makefile there is enough.
# Who meets it: everyone who trains from the package and not from a checkout of Megatron-LM.
#
# Output of 2026-11-27:
#   in the wheel: helpers.cpp, helpers_cpp.so, no Makefile
#   start of training: make says "No targets specified and no makefile found", exit status 1
#   with an empty Makefile: exit status 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=$folder/venv/bin/pip
"$pip" install --quiet torch==2.13.0 numpy==2.2.6 packaging triton==3.7.1
# The wheel is for Python 3.12; this part of it runs on 3.11, too.
"$pip" install --quiet --no-deps --target "$folder/site" --only-binary :all: --implementation cp --python-version 3.12 \
  --ignore-requires-python megatron-core==0.19.2
datasets=$folder/site/megatron/core/datasets
export PYTHONPATH=$folder/site NO_VCS_VERSION=1 PYTHONWARNINGS=ignore LC_ALL=C
start() { # what `_compile_dependencies` of megatron/training/initialize.py calls on rank 0
  "$folder/venv/bin/python" -c 'from megatron.core.datasets.utils import compile_helpers; compile_helpers()' >"$folder/log" 2>&1
}
{
  ls "$datasets" | sed -n 's/^helpers_cpp\..*\.so$/helpers_cpp.so/p; /^helpers.cpp$/p; /[Mm]akefile/p' | paste -sd, |
    sed 's/,/, /g; s/^/in the wheel: /; s/$/, no Makefile/'
  if start; then status=0; else status=$?; fi
  echo "start of training: make says \"$(grep -o 'No targets specified and no makefile found' "$folder/log")\", exit status $status"
  printf 'default:\n' >"$datasets/Makefile"
  if start; then status=0; else status=$?; fi
  echo "with an empty Makefile: exit status $status"
} | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
in the wheel: helpers.cpp, helpers_cpp.so, no Makefile
start of training: make says "No targets specified and no makefile found", exit status 1
with an empty Makefile: exit status 0
EXPECTED
