"""A checkpoint in another number format: which steps make it, by the format.

Two rules make all of them, `quantize` and `finalize_quantized`; receipts keep the name of a step for each use, by which
a store is read whatever version made it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recoding:
    """How receipts call what makes a format.

    Args:
        step: The parts.
        finalize_step: What joins them.
        source: What both are made from.
    """

    step: str
    finalize_step: str
    source: str


ENGINES = Recoding("quantize_rollout_fp8", "finalize_rollout_fp8", "hf_patched")
SERVING = Recoding("quantize_serving", "finalize_serving", "hf_patched")
BF16 = Recoding("cast_to_bf16", "finalize_bf16", "hf")
_RULES = {
    name: rule
    for use in (ENGINES, SERVING, BF16)
    for name, rule in ((use.step, "quantize"), (use.finalize_step, "finalize_quantized"))
}


def recoding_of(number_format: str) -> Recoding:
    """Return the steps of a format: "fp8" is for training's engines, "bf16" is a cast back, all others are served."""
    return {"fp8": ENGINES, "bf16": BF16}.get(number_format, SERVING)


def rule_of(step: str) -> str:
    """Return the rule that runs a step of a receipt; most have one name."""
    return _RULES.get(step, step)
