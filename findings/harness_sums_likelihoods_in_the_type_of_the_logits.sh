#!/usr/bin/env bash
# lm-eval 0.4.13, transformers 5.24.0, torch 2.13.0. Likelihoods of a bf16 model have eight bits, however long the text.
#
# Expected: the log-likelihood of a text is the sum of those of its tokens in float32, whatever type the model has; the
# rounding of the model's logits is noise that a long text averages out.
# Behaviour: the softmax is taken in the type of the logits, and so is the sum over the tokens: what comes out of a
# window is a bf16 number. Between 64 and 128 nats, as an answer of a sentence has, likelihoods are multiples of 0.5; a
# window of a thousand tokens, of some 5000 nats, has a multiple of 32. So choices tie, and a tie goes to the one that
# is listed first; the perplexity of a text of one window is wrong by up to 1.6 % there, and two checkpoints that differ
# by less are equal or in the wrong order. Longer windows do not help, since the step grows with the sum; many windows
# do. Models are loaded in the type of their file, mostly bf16. The help of `softmax_dtype` speaks of stability and
# leaves it at the model's type; "float32" makes the sum float32 as well, and is right. Nothing is reported, but that
# all likelihoods are round numbers.
# Who meets it: comparisons of checkpoints whose accuracies differ by a per cent or two, and perplexities of few
# documents.
#
# Output of 2026-12-01 (a random model in bf16, 600 questions with four choices of 20 tokens and 12 texts of 1000, all
# drawn from it):
#   softmax_dtype None: answers multiples of 0.5, texts multiples of 32, ties for the first place over 1 %
#   softmax_dtype float32: answers any numbers, texts any numbers, ties for the first place none
#   chosen otherwise: over 1 %; largest difference in perplexity: over 1 %
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
packages=(lm-eval==0.4.13 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0)
"$folder/venv/bin/pip" install --quiet "${packages[@]}" 2>/dev/null
cat >"$folder/sums.py" <<'PYTHON'
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS, QUESTIONS, CHOICES, LENGTH, TEXTS = 4096, 600, 4, 20, 12
words = ["<unknown>", "<end>", *(f"w{number}" for number in range(2, WORDS))]
tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unknown>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = {"bos_token": "<end>", "eos_token": "<end>", "pad_token": "<end>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
shape |= {"max_position_embeddings": 1024, "initializer_range": 0.3}
config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=4, **shape)
model = LlamaForCausalLM(config).to(torch.bfloat16).eval()


def drawn(prompts, count):
    """Words that the model itself goes on with."""
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": count, "min_new_tokens": count}
    tokens = model.generate(prompts, eos_token_id=1, pad_token_id=1, **settings)
    return [" ".join(words[token] for token in row) for row in tokens[:, prompts.shape[1] :].tolist()]


def share(which):
    part = which.double().mean().item()
    return "none" if part == 0 else "over 1 %" if part > 0.01 else f"{part:.4f}"


def asked(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=argument, idx=at) for at, argument in enumerate(arguments)]


def step(values):
    """The greatest power of two of which all values are multiples, if there is one above 1/1000."""
    sizes = (2.0**power for power in range(10, -10, -1))
    return next((f"multiples of {size:g}" for size in sizes if ((values / size) % 1 == 0).all()), "any numbers")


texts = [(text,) for text in drawn(torch.full((TEXTS, 1), 1), 1000)]
prompts = torch.randint(2, WORDS, (QUESTIONS, 32))
choices = drawn(prompts.repeat_interleave(CHOICES, 0), LENGTH)
prompts = [" ".join(words[token] for token in row) for row in prompts.tolist()]
pairs = [(prompts[at // CHOICES], " " + choice) for at, choice in enumerate(choices)]
found = {}
for name in (None, "float32"):
    evaluated = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, softmax_dtype=name)
    answers = evaluated.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    whole = torch.tensor(evaluated.loglikelihood_rolling(asked("loglikelihood_rolling", texts), disable_tqdm=True))
    scores = torch.tensor([score for score, _ in answers]).view(QUESTIONS, CHOICES)
    found[name] = scores.argmax(1), whole
    tied = share((scores == scores.max(1, keepdim=True).values).sum(1) > 1)
    near = scores[(scores < -64) & (scores > -128)]
    told = f"answers {step(near)}, texts {step(whole)}, ties for the first place {tied}"
    print(f"softmax_dtype {name}: {told}", flush=True)
(rounded, whole), (exact, right) = found.values()
worst = ((right - whole) / 1000).exp().sub(1).abs().max()
worst = "over 1 %" if worst > 0.01 else f"{worst:.4f}"
print(f"chosen otherwise: {share(rounded != exact)}; largest difference in perplexity: {worst}", flush=True)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/sums.py" 2>/dev/null >"$folder/told"
grep -E '^(softmax|chosen)' "$folder/told" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
softmax_dtype None: answers multiples of 0.5, texts multiples of 32, ties for the first place over 1 %
softmax_dtype float32: answers any numbers, texts any numbers, ties for the first place none
chosen otherwise: over 1 %; largest difference in perplexity: over 1 %
EXPECTED
