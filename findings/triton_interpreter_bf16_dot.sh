#!/bin/bash
# triton 3.7.1, torch 2.13.0, Linux x86-64, Python 3.11.
#
# With TRITON_INTERPRET=1, tl.dot of BF16 numbers multiplies their bit patterns as 16-bit integers: the interpreter keeps
# BF16 as uint16, and `create_dot` converts 8-bit floats only. One would expect the product that a GPU gives, which the
# interpreter does give for FP16 and FP32, or an error.
# Here: tests convert the factors to FP32 first (`tests/support/interpreted_triton.py`).
#
# Seen on 2026-11-29, for the sum of 16 products 2 x 3:
#   float16: 96.0
#   float32: 96.0
#   bfloat16: 4311744512.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy
cat > "$folder/product.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def multiply(left, right, out, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = row * SIZE + column
    tl.store(out + place, tl.dot(tl.load(left + place), tl.load(right + place)))


for dtype in (torch.float16, torch.float32, torch.bfloat16):
    left, right = torch.full((16, 16), 2, dtype=dtype), torch.full((16, 16), 3, dtype=dtype)
    out = torch.empty(16, 16)
    multiply[(1,)](left, right, out, SIZE=16)
    print(f"{str(dtype).removeprefix('torch.')}: {out[0, 0].item()}")
PY
output=$(TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/product.py")
echo "$output"
[ "$output" = "float16: 96.0
float32: 96.0
bfloat16: 4311744512.0" ]
