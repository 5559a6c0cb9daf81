#!/bin/bash
# TRL 1.16.0, transformers 5.23.0, torch 2.13.0, Linux x86-64, Python 3.11.
#
# The chat template of GLM-4.5 has no token that ends an assistant's turn: the next turn's marker does, and the model
# samples it (`<|observation|>` after a call). GRPOTrainer's tool loop appends what its template renders after a call,
# and cuts off what the model has sampled only where that is the tokenizer's `eos_token`. So for GLM-4.5 the marker
# comes twice in a row, and the model is trained and asked on a conversation that its template never writes. One would
# expect one marker, or an error.
# Here: the episode goes on after the sampled stop token; `tests/unit/rl/rollout/test_trl_tool_loop.py` compares both.
#
# Seen on 2026-11-30:
#   sampled: CALL<|observation|>
#   appended: <|observation|>\n<tool_response>\n42\n</tool_response><|assistant|>
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/marker.py" <<'PY'
import sys
from importlib.resources import files

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(letters)}, merges=[]))
backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
backend.add_special_tokens([AddedToken(text, special=True) for text in special])
template = (files("trl") / "chat_templates/glm4moe.jinja").read_text()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>", chat_template=template
)
call = "<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
answers = iter([call, "<think></think>\n42<|user|>"])
sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **sizes))
model.generate = lambda input_ids, **_: torch.cat(
    [input_ids, torch.tensor([tokenizer.encode(next(answers))] * len(input_ids))], dim=1
)


def add(a: int) -> int:
    """Add.

    Args:
        a: A number.
    """
    return 42


asked = [{"role": "user", "content": "add"}]
trainer = GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, **_: [0.0] * len(completions),
    tools=[add],
    args=GRPOConfig(output_dir=sys.argv[1], use_cpu=True, bf16=False, report_to=[], num_generations=2,
                    per_device_train_batch_size=2, max_completion_length=1000),
    train_dataset=Dataset.from_list([{"prompt": asked}]),
    processing_class=tokenizer,
)
out = trainer._generate_and_score_completions([{"prompt": asked}] * 2)
text = tokenizer.decode(out["completion_ids"][0])
appended = text.removeprefix(call).removesuffix("<think></think>\n42<|user|>")
print("sampled: CALL" + call.partition("</tool_call>")[2])
print("appended: " + appended.replace("\n", "\\n"))
sys.exit(0 if appended.startswith("<|observation|>") else 1)
PY
"$folder/venv/bin/python" "$folder/marker.py" "$folder/out" 2> "$folder/log" || { tail -5 "$folder/log"; exit 1; }
