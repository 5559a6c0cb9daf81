"""A checkpoint in another number format: which steps make it, by the format.

Two rules make all of them, `quantize` and `finalize_quantized`; receipts keep the name of a step for each use, by which
a store is read whatever version made it.
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


# What names of folders begin with: an export in FP8 lies in the store, where other names are models'.
EXPORT_FOLDER, START_FOLDER = "export_fp8", "rollout_start"
ENGINES = Recoding("quantize_rollout_fp8", "finalize_rollout_fp8", "hf_patched")
# What engines that begin empty read: config and tokenizer, and what they draft with.
START = Recoding("quantize_rollout_start", "finalize_rollout_start", "hf_patched")
EXPORT = Recoding("quantize_export_fp8", "finalize_export_fp8", "hf_export")
SERVING = Recoding("quantize_serving", "finalize_serving", "hf_patched")
# The same of what was trained.
EXPORT_SERVING = Recoding("quantize_export_serving", "finalize_export_serving", "hf_export")
BF16 = Recoding("cast_to_bf16", "finalize_bf16", "hf")
RECODINGS = (ENGINES, START, EXPORT, SERVING, EXPORT_SERVING, BF16)
# How the picture of the rules calls what `quantize` makes besides all of the model as it came.
OTHER_QUANTISED = {"start": (START, START_FOLDER), "after": (EXPORT, EXPORT_FOLDER)}
_RULES = {
    name: rule
    for use in RECODINGS
    for name, rule in ((use.step, "quantize"), (use.finalize_step, "finalize_quantized"))
}


def recoding_of(step: str) -> Recoding:
    """Return the recoding of which a step makes the parts."""
    (found,) = (use for use in RECODINGS if use.step == step)
    return found


def rule_of(step: str) -> str:
    """Return the rule that runs a step of a receipt, or that logged under an older name; most have one name."""
    return _RULES.get(step, CURRENT_RULES.get(step, step))
