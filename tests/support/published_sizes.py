"""How many GPUs published guides serve GLM-5 on."""

from __future__ import annotations

# seeds/sglang-glm5-cookbook.txt, section 3.2: hardware, weights, tensor parallelism. Two kinds of GPU share a row.
COOKBOOK = (
    ("h100", "fp8", 16),
    ("h100", "bf16", 32),
    ("h200", "fp8", 8),
    ("h200", "bf16", 16),
    ("b200", "fp8", 8),
    ("b200", "bf16", 16),
    ("mi300x", "bf16", 8),
    ("mi325x", "bf16", 8),
    ("mi355x", "bf16", 8),
)
