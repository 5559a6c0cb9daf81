"""Sampling of responses, and the queue between engines and trainer."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import ANY, _doc


@dataclass(frozen=True)
class Rollout:
    """Sampling of responses."""

    rollout_batch_size: int = _doc(
        "Prompts per step; if the dataset has fewer, they come from several epochs", minimum=1
    )
    num_samples_per_prompt: int = _doc("Responses per prompt (the group)", minimum=1)
    max_response_tokens: int = _doc("Maximum tokens of a response", minimum=1)
    max_prompt_tokens: int = _doc(
        "Maximum tokens of a prompt; 0: unlimited, and the plan assumes a quarter of a response",
        0,
        minimum=0,
        unnamed=ANY,
    )
    overlong_prompts: str = _doc(
        "Prompts longer than `max_prompt_tokens`: refuse the run before it trains, or drop and count them",
        "refuse",
        choices=("refuse", "drop"),
        unnamed="refuse",
    )
    overlong_samples: str = _doc(
        "Samples longer than the trainer's token budget: own_row: each becomes a micro-batch, for which "
        "the plan reserves memory; cut: responses end at the budget; refuse: reject configurations in "
        "which they can occur",
        "own_row",
        choices=("own_row", "cut", "refuse"),
        unnamed="own_row",
    )
    max_staleness: int = _doc(
        "Engines generate while the trainer trains: largest number of updates between the oldest weights that "
        "sampled a group and the weights that train on it. 0: they wait for each other",
        0,
        minimum=0,
        unnamed=0,
    )
    on_new_weights: str = _doc(
        "Running requests when the engines get new weights (max_staleness above 0): recompute their KV cache, keep "
        "it, finish them first, or abort them and ask for the rest",
        "recompute",
        choices=("recompute", "keep", "finish", "abort"),
        unnamed="recompute",
    )
    tail_fraction: float = _doc(
        "Where trainer and engines take turns: groups that may be unfinished when a step trains, as a share of "
        "rollout_batch_size; the next step continues them (max_staleness above 0)",
        0.0,
        minimum=0,
        maximum=1,
        unnamed=0.0,
    )
    longest_first: bool = _doc(
        "Of the groups that may start, start those first whose prompts had the longest responses in earlier epochs; "
        "prompts without a past come before them",
        False,
        unnamed=False,
    )
    dynamic_sampling: bool = _doc(
        "Drop groups whose rewards are all equal, which teach nothing, and sample others in their place",
        False,
        unnamed=False,
    )
    max_oversampling: float = _doc(
        "Groups generated for a step, at most, as a multiple of rollout_batch_size; groups beyond it are kept "
        "with equal rewards",
        3.0,
        minimum=1,
        maximum=100,
        unnamed=3.0,
    )
    temperature: float = _doc("Sampling temperature, also of log-probabilities", exclusive_minimum=0)
    fp8: bool = _doc("Engines serve FP8 weights (see `quantize`); the trainer keeps its precision")
