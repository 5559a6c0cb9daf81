#!/bin/bash
# TRL 1.16.0, transformers 5.23.0, accelerate 1.15.0, torch 2.13.0, Linux x86-64, Python 3.11.
#
# GRPOTrainer replaces the model's `forward` by one that calls the original's bound method. `copy.deepcopy` copies the
# weights of such a model, and binds the new `forward` to the copy, but not the method inside it: the copy answers with
# the weights of the model that is trained. One would expect a frozen copy, to take old or reference log-probabilities
# from: they would always equal the new ones, every ratio would be 1, and nothing would say so.
# Here: copies are made before TRL gets the model; a test checks that a stale copy stays stale.
#
# Seen on 2026-11-30:
#   copy made before the trainer: changed by the update of the other: False
#   copy made after it: has weights of its own: True, changed by the update of the other: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/copies.py" <<'PY'
import copy
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

torch.manual_seed(0)
sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes))
words = Tokenizer(WordLevel({f"w{i}": i for i in range(16)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
before = copy.deepcopy(model)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, **_: [0.0] * len(completions),
    args=GRPOConfig(output_dir=sys.argv[1], use_cpu=True, bf16=False, report_to=[], num_generations=2,
                    per_device_train_batch_size=2),
    train_dataset=Dataset.from_list([{"prompt": "w3"}]),
    processing_class=tokenizer,
)
after = copy.deepcopy(trainer.model)
tokens = torch.tensor([[3, 4, 5]])


@torch.no_grad()
def logits():
    return before(tokens).logits.clone(), after(tokens).logits.clone()


old = logits()
weight = after.lm_head.weight.clone()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(1.5)
changed = [not torch.equal(one, other) for one, other in zip(old, logits())]
own = torch.equal(weight, after.lm_head.weight)
print(f"copy made before the trainer: changed by the update of the other: {changed[0]}")
print(f"copy made after it: has weights of its own: {own}, changed by the update of the other: {changed[1]}")
sys.exit(0 if (changed, own) == ([False, True], True) else 1)
PY
"$folder/venv/bin/python" "$folder/copies.py" "$folder/out"
