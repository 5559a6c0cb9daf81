"""The steps that write a checkpoint in another number format.

The rules `quantize` and `finalize_quantized` write all formats; receipts keep one step name per use, so stores of older
versions remain readable.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.store.format_versions import CURRENT_RULES


@dataclass(frozen=True)
class Recoding:
    """The names, in receipts, of the steps that make a format.

    Args:
        step: The step that makes the parts.
        finalize_step: The step that joins them.
        source: What both are made from.
    """

    step: str
    finalize_step: str
    source: str


# Prefix of folder names: an export in FP8 is in the store, where the other names are models.
EXPORT_FOLDER, START_FOLDER = "export_fp8", "rollout_start"
ENGINES = Recoding("quantize_rollout_fp8", "finalize_rollout_fp8", "hf_patched")
# Files for engines that start without weights: config, tokenizer and draft layers.
START = Recoding("quantize_rollout_start", "finalize_rollout_start", "hf_patched")
EXPORT = Recoding("quantize_export_fp8", "finalize_export_fp8", "hf_export")
SERVING = Recoding("quantize_serving", "finalize_serving", "hf_patched")
# The same for trained weights.
EXPORT_SERVING = Recoding("quantize_export_serving", "finalize_export_serving", "hf_export")
BF16 = Recoding("cast_to_bf16", "finalize_bf16", "hf")
RECODINGS = (ENGINES, START, EXPORT, SERVING, EXPORT_SERVING, BF16)
# Labels in the rule graph for other outputs of `quantize` than the source model in FP8.
OTHER_QUANTISED = {"start": (START, START_FOLDER), "after": (EXPORT, EXPORT_FOLDER)}
_RULES = {
    name: rule
    for use in RECODINGS
    for name, rule in ((use.step, "quantize"), (use.finalize_step, "finalize_quantized"))
}


def recoding_of(step: str) -> Recoding:
    """Return the recoding whose parts a step makes."""
    (found,) = (use for use in RECODINGS if use.step == step)
    return found


def rule_of(step: str) -> str:
    """Return the rule of a step in a receipt, or of an older name in a log; most steps are named like their rule."""
    return _RULES.get(step, CURRENT_RULES.get(step, step))
