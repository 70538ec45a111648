#!/usr/bin/env bash
# megatron-core 0.16.1, 0.17.0, 0.18.0, 0.19.2. The same flags make a model with one row fewer in embedding and head since 0.18.
#
# Expected: `--tokenizer-type NullTokenizer --vocab-size N`, the flags of nearly every benchmark with random tokens, give the
# same model in every version, or a version that changes it says so.
# Behaviour: until 0.17 the tokenizer adds an id for the end of a document, so scripts pass N - 1 to get N rows (128255 for
# Llama 3). Since 0.18 it takes the last id for that and adds none: the same scripts make 128255 rows, without a word. With the
# default padding to multiples of 128 it does not show; with `--make-vocab-size-divisible-by 1` the model is another one and
# its matrices have an odd number of rows.
# Who meets it: whoever upgrades a benchmark, or loads a checkpoint of it.
#
# Output of 2026-11-27:
#   0.16.1: --vocab-size 128255 is 128256 ids, end of document 128255
#   0.17.0: --vocab-size 128255 is 128256 ids, end of document 128255
#   0.18.0: --vocab-size 128255 is 128255 ids, end of document 128254
#   0.19.2: --vocab-size 128255 is 128255 ids, end of document 128254
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 0.16.1 0.17.0 0.18.0 0.19.2; do
  python3 -m pip download --quiet --no-deps --only-binary :all: --implementation cp --python-version 3.12 \
    --dest "$folder/$version" "megatron-core==$version" 2>/dev/null
  python3 -m zipfile -e "$folder/$version"/*.whl "$folder/$version/site"
  # The file alone: its package imports torch.
  python3 - "$folder/$version/site/megatron/core/tokenizers/text/libraries/null_tokenizer.py" "$version" <<'PYTHON'
import runpy
import sys

tokenizer = runpy.run_path(sys.argv[1])["NullTokenizer"](128255)
print(f"{sys.argv[2]}: --vocab-size 128255 is {tokenizer.vocab_size} ids, end of document {tokenizer.eod}")
PYTHON
done | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
0.16.1: --vocab-size 128255 is 128256 ids, end of document 128255
0.17.0: --vocab-size 128255 is 128256 ids, end of document 128255
0.18.0: --vocab-size 128255 is 128255 ids, end of document 128254
0.19.2: --vocab-size 128255 is 128255 ids, end of document 128254
EXPECTED
