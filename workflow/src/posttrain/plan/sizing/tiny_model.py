"""Limits of the rule make_tiny_model: a small GLM-5, Qwen3 or Qwen3.5, trained on one CPU in FP32 with Adam."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.schema import Architecture
from posttrain.errors import Problem
from posttrain.plan.sizing.model_size import count_parameters, saved_weights

# Families with a warm-up.
MADE = ("glm_moe_dsa", "qwen3", "qwen3_5", "qwen3_5_moe")
# Tokens of the generated tokenizer.
SMALLEST_VOCABULARY = 64
# The warm-up has 420 steps of 24 sequences of some 35 tokens: at 6 operations per token and parameter, 18 minutes on
# a CPU with 0.2 TFLOPS (config/hardware/cpu.yaml).
MOST_PARAMETERS = 100_000_000


def check_made(architecture: Architecture) -> Iterator[Problem]:
    """Yield problems that prevent making a model of this architecture."""
    if architecture.model_type not in MADE:
        remedy = "only these are made here; take another model from the Hub or a folder"
        yield Problem(
            "family-not-made", "model.architecture.model_type", architecture.model_type, ", ".join(MADE), remedy
        )
    if architecture.index_topk_freq > 1:
        remedy = "the warm-up trains an indexer in each layer"
        allowed = "1, to be made"
        yield Problem(
            "family-not-made", "model.architecture.index_topk_freq", str(architecture.index_topk_freq), allowed, remedy
        )
    if architecture.vocab_size < SMALLEST_VOCABULARY:
        allowed, remedy = f"at least {SMALLEST_VOCABULARY}", "the tokenizer has that many tokens"
        yield Problem(
            "vocabulary-too-small", "model.architecture.vocab_size", str(architecture.vocab_size), allowed, remedy
        )
    count = count_parameters(saved_weights(architecture))
    if count > MOST_PARAMETERS:
        found, allowed = f"made, with {count:,} parameters", f"made up to {MOST_PARAMETERS:,} parameters; hub; folder"
        remedy = "take the weights from the Hub or a folder, or make a smaller model (model.architecture)"
        yield Problem("model-too-large-to-make", "model.source.kind", found, allowed, remedy)
