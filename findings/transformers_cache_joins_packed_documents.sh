#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.13.0. Packed documents attend to each other while `use_cache` has its default.
#
# Expected: positions that begin again at 0 separate the documents of a row, as the collator for packed rows
# (`DataCollatorWithFlattening`, which gives positions and no mask) relies on; a cache, of which a training step reads nothing,
# changes no loss.
# Behaviour: with eager and SDPA attention documents are looked for in the positions only if there is no cache and no mask. The
# model's own default makes a cache in training, too. So a plain `model(**batch)` lets every document see all earlier ones in
# its row, without a word, and the same batch with `use_cache=False` has another loss. A mask of ones, which tokenizers give by
# default, joins the documents in either case. Gradient checkpointing turns the cache off, so it changes the loss: with it the
# documents are separate.
# Who meets it: a training loop of one's own over packed rows, and each comparison of losses with a framework that separates
# documents. Pass `use_cache=False` and no `attention_mask`.
#
# Output of 2026-11-29 (whether the second document's logits change when the first document does; two rows a batch):
#   eager, defaults: yes
#   eager, use_cache=True: yes
#   eager, use_cache=False: no
#   eager, use_cache=False, a mask of ones: yes
#   eager, defaults, gradient checkpointing: no
#   sdpa, defaults: yes
#   sdpa, use_cache=True: yes
#   sdpa, use_cache=False: no
#   sdpa, use_cache=False, a mask of ones: yes
#   sdpa, defaults, gradient checkpointing: no
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.2.6 2>/dev/null
cat >"$folder/packed.py" <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FIRST, SECOND = 6, 10
positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)]).expand(2, -1)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
settings = {
    "defaults": {},
    "use_cache=True": {"use_cache": True},
    "use_cache=False": {"use_cache": False},
    "use_cache=False, a mask of ones": {"use_cache": False, "attention_mask": torch.ones(2, FIRST + SECOND)},
}
for attention in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention)).double().train()
    first, other, second = (torch.randint(64, (2, size)) for size in (FIRST, FIRST, SECOND))

    def changes(arguments):
        rows = [torch.cat([one, second], dim=1) for one in (first, other)]
        logits = [model(input_ids=ids, position_ids=positions, **arguments).logits[:, FIRST:] for ids in rows]
        return "yes" if (logits[0] - logits[1]).abs().max() > 1e-9 else "no"

    for name, arguments in settings.items():
        print(f"{attention}, {name}: {changes(arguments)}")
    model.gradient_checkpointing_enable()
    print(f"{attention}, defaults, gradient checkpointing: {changes({})}")
PYTHON
"$folder/venv/bin/python" "$folder/packed.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
eager, defaults: yes
eager, use_cache=True: yes
eager, use_cache=False: no
eager, use_cache=False, a mask of ones: yes
eager, defaults, gradient checkpointing: no
sdpa, defaults: yes
sdpa, use_cache=True: yes
sdpa, use_cache=False: no
sdpa, use_cache=False, a mask of ones: yes
sdpa, defaults, gradient checkpointing: no
EXPECTED
