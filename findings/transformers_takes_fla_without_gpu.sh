#!/bin/bash
# transformers 5.23.0, fla-core 0.6.0, triton 3.7.1, torch 2.13.0, Linux x86-64, Python 3.11.
#
# A Qwen3.5 that runs on a machine without a GPU raises an error there once fla-core and triton are installed.
# transformers has each function of its gated delta nets in torch, and replaces it by fla's where that can be imported
# (`use_kernel_func_from_hub_with_fallback` in `integrations/hub_kernels.py`); it asks neither for a GPU nor where the
# model is. fla can be imported without a GPU (it even has an extra `cpu`), and its Triton kernels fail when called. One
# would expect the fallback to torch, or an error that names fla and how to do without it.
# Here: fla is hidden while transformers' modules are imported without a GPU (`checkpoint/formats/modelling.py`).
#
# Seen on 2026-12-01:
#   without fla: logits [1, 3, 32]
#   with fla: RuntimeError: 0 active drivers ([]). There should only be one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
cat > "$folder/forward.py" <<'PY'
import sys

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

torch.manual_seed(0)
attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
delta_net = {f"linear_{key}": 2 for key in ("num_key_heads", "num_value_heads")}
delta_net |= {f"linear_{key}": 8 for key in ("key_head_dim", "value_head_dim")}
config = Qwen3_5TextConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                           layer_types=["linear_attention", "full_attention"], **attention, **delta_net)
model = Qwen3_5ForCausalLM(config).eval()
try:
    with torch.no_grad():
        print(f"{sys.argv[1]}: logits {list(model(torch.tensor([[1, 2, 3]])).logits.shape)}")
except Exception as error:
    print(f"{sys.argv[1]}: {type(error).__name__}: {error}")
PY
forward() {
    CUDA_VISIBLE_DEVICES="" "$folder/venv/bin/python" "$folder/forward.py" "$1"
}
# torch's build for GPUs brings triton along, but not fla.
without=$(forward "without fla")
echo "$without"
"$folder/venv/bin/pip" install --quiet fla-core==0.6.0 triton==3.7.1
with=$(forward "with fla")
echo "$with"
[ "$without" = "without fla: logits [1, 3, 32]" ]
[ "$with" = "with fla: RuntimeError: 0 active drivers ([]). There should only be one." ]
