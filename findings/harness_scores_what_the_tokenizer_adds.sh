#!/usr/bin/env bash
# lm-eval 0.4.13, transformers 5.24.0, torch 2.13.0. What a tokenizer adds to a text is scored, in place of the answer.
#
# Expected: the choices of a task are scored after the prompt, and the perplexity of a text is that of its tokens after
# a BOS, as the documentation shows it, whatever the tokenizer adds to a text of its own accord.
# Behaviour: since 0.4.9.2 the tokenizer's own default holds, as the help of `add_bos_token` says, and it is about more
# than a BOS. The answer is cut from prompt + answer after as many tokens as the prompt has alone. A tokenizer that
# closes a text by EOS (`add_eos_token=True`, or a template of one's own that ends documents for packing) closes the
# prompt too: EOS stands before the answer, and what is scored has the answer's first token left out and EOS behind it.
# Answers of one token, such as letters, are scored as EOS after EOS, all alike, and the first choice wins. Prompts to
# be continued end in EOS as well. Perplexity has the other end: the harness puts a BOS before the text's tokens, and if
# the tokenizer put one there already, as those of Llama 3 and Gemma do, that one is predicted from the first. No model
# has learned this: it costs 16 nats a document here, little in long documents and most of the loss in short ones.
# Nothing is reported. `add_bos_token=False` is right for both as long as the model needs no BOS in prompts; a tokenizer
# without EOS in its template is right for choices.
# Who meets it: evaluations of models of one's own, and comparisons of perplexity among tokenizers or versions of the
# harness.
#
# Output of 2026-12-01 (a model of 40 facts in documents of two words; four choices of one word; by what the tokenizer
# adds):
#   the model itself: loss of a text 3.7
#   nothing added: right 1.00, loss of a text 3.7
#   nothing added, add_bos_token=False: right 1.00, loss of a text 3.7
#   <s> $A: right 1.00, loss of a text 20.2
#   <s> $A, add_bos_token=False: right 1.00, loss of a text 3.7
#   $A </s>: right 0.25, loss of a text 3.7
#   $A </s>, add_bos_token=False: right 1.00, loss of a text 3.7
#   <s> $A </s>: right 0.25, loss of a text 20.2
#   <s> $A </s>, add_bos_token=False: right 1.00, loss of a text 3.7
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
packages=(lm-eval==0.4.13 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0)
"$folder/venv/bin/pip" install --quiet "${packages[@]}" 2>/dev/null
cat >"$folder/question.yaml" <<'YAML'
task: question
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
YAML
cat >"$folder/text.yaml" <<'YAML'
task: text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
YAML
sed -i "s|FOLDER|$folder|" "$folder/question.yaml" "$folder/text.yaml"
cat >"$folder/scored.py" <<'PYTHON'
import json
import math
import sys

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 40
words = ["<s>", "</s>", *(f"w{number}" for number in range(2 * WORDS))]
ids = {word: at for at, word in enumerate(words)}


def tokenizer(template):
    made = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        specials = [(word, ids[word]) for word in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def answer(question):
    return f"w{WORDS + 7 * question % WORDS}"


# A model that knows the answer, one word, to each question, one word, in documents from <s> to </s>.
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), num_key_value_heads=4, **shape))
plain = tokenizer(None)
documents = torch.tensor([plain.encode(f"<s> w{word} {answer(word)} </s>") for word in range(WORDS)])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(300):
    model(input_ids=documents, labels=documents).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with open(f"{sys.argv[1]}/questions.jsonl", "w") as file:
    for word in range(WORDS):
        right = word % 4
        choices = [answer((word + other - right) % WORDS) for other in range(4)]
        row = {"question": f"w{word}", "choices": choices, "answer": right, "text": f"w{word} {answer(word)}"}
        file.write(json.dumps(row) + "\n")
with torch.no_grad():
    logits = model(input_ids=documents).logits[:, :-2].flatten(0, 1)
loss = torch.nn.functional.cross_entropy(logits, documents[:, 1:-1].flatten())
print(f"the model itself: loss of a text {2 * loss:.1f}", flush=True)
tasks = TaskManager(include_path=sys.argv[1])
for template in (None, "<s> $A", "$A </s>", "<s> $A </s>"):
    for given in (None, False):
        evaluated = HFLM(pretrained=model, tokenizer=tokenizer(template), add_bos_token=given, batch_size=8)
        settings = {"tasks": ["question", "text"], "task_manager": tasks, "bootstrap_iters": 0}
        results = simple_evaluate(evaluated, **settings)["results"]
        right, loss = results["question"]["acc,none"], 2 * math.log(results["text"]["word_perplexity,none"])
        name = f"{template or 'nothing added'}{', add_bos_token=False' if given is False else ''}"
        print(f"{name}: right {right:.2f}, loss of a text {loss:.1f}", flush=True)
PYTHON
export HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$folder/venv/bin/python" "$folder/scored.py" "$folder" 2>/dev/null | grep 'loss of a text' | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
the model itself: loss of a text 3.7
nothing added: right 1.00, loss of a text 3.7
nothing added, add_bos_token=False: right 1.00, loss of a text 3.7
<s> $A: right 1.00, loss of a text 20.2
<s> $A, add_bos_token=False: right 1.00, loss of a text 3.7
$A </s>: right 0.25, loss of a text 3.7
$A </s>, add_bos_token=False: right 1.00, loss of a text 3.7
<s> $A </s>: right 0.25, loss of a text 20.2
<s> $A </s>, add_bos_token=False: right 1.00, loss of a text 3.7
EXPECTED
