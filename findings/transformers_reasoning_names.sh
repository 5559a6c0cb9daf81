#!/bin/sh
# transformers 5.23.0 shows a chat template the reasoning of a message as `reasoning_content` and as `thinking`, whichever
# of `reasoning_content`, `thinking` and `reasoning` the message has. A template that reads `reasoning_content` alone
# shows a message's `thinking`, and an engine that renders with jinja2 itself does not. `thoughts` is no such name.
#
# Seen on 2026-11-28, with a template that shows message.reasoning_content:
#   reasoning_content <why>
#   thinking          <why>
#   reasoning         <why>
#   thoughts          <>
# Exits with 1 when any of these lines differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 jinja2==3.1.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
tokenizer.chat_template = "{% for m in messages %}<{{ m.reasoning_content or '' }}>{% endfor %}"
seen = {
    name: tokenizer.apply_chat_template([{"role": "assistant", "content": "2", name: "why"}], tokenize=False)
    for name in ("reasoning_content", "thinking", "reasoning", "thoughts")
}
for name, text in seen.items():
    print(f"{name:17} {text}")
sys.exit(list(seen.values()) != ["<why>", "<why>", "<why>", "<>"])
PYTHON
