"""The section `reward`: grading of responses (docs/rewards.md); `data.reward` chooses the grader."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.services import Judge, Service
from posttrain.document import ANY, _doc

THINK_THEN_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
# The built-in graders.
BUILT_IN = (
    *("exact_match", "choice", "f1", "math", "math_answer", "math_dapo", "math_deepscaler"),
    *("format", "length", "overlong", "repetition", "reasoning_gym", "environment", "code"),
)


@dataclass(frozen=True)
class Reward:
    """Grading of responses."""

    deadline_seconds: float = _doc(
        "Time limit for grading one response; then its process is killed", 10.0, exclusive_minimum=0, unnamed=ANY
    )
    num_workers: int = _doc("Grading processes", 2, minimum=1, unnamed=ANY)
    memory_gib: float = _doc("Memory limit of a grading process", 1.0, exclusive_minimum=0, unnamed=ANY)
    max_failure_share: float = _doc(
        "Share of a step's responses whose grader may fail (deadline, crash, exception); they are "
        "counted and have no reward. A larger share ends the run",
        0.05,
        minimum=0,
        maximum=1,
        unnamed=0.05,
    )
    min_own_label: float = _doc(
        "Minimum share of labels that must get full marks as the response to their own prompt, checked before training",
        0.99,
        minimum=0,
        maximum=1,
        unnamed=ANY,
    )
    max_other_label: float = _doc(
        "Maximum share of labels that may get full marks as the response to another prompt",
        0.01,
        minimum=0,
        maximum=1,
        unnamed=ANY,
    )
    max_label_in_prompt: float = _doc(
        "Maximum share of prompts that contain their own label, beyond the share that contain another "
        "row's; 1 for tasks whose answer is in the prompt",
        0.5,
        minimum=0,
        maximum=1,
        unnamed=ANY,
    )
    format_pattern: str = _doc(
        "`format`: regular expression that a whole response must match",
        THINK_THEN_ANSWER,
        unnamed=THINK_THEN_ANSWER,
    )
    target_tokens: int = _doc("`length`: best response length", 1024, minimum=1, unnamed=1024)
    overlong_buffer_tokens: int = _doc(
        "`overlong`: number of tokens before rollout.max_response_tokens over which the penalty grows to "
        "1; at most rollout.max_response_tokens",
        4096,
        minimum=1,
        unnamed=4096,
    )
    repetition_ngram: int = _doc(
        "`repetition`: number of words in the sequences whose repetitions are counted", 4, minimum=1, unnamed=4
    )
    services: dict[str, Service] = field(
        default_factory=dict, metadata={"doc": "Services that grade, by names of your own", "unnamed": ANY}
    )
    judges: dict[str, Judge] = field(
        default_factory=dict, metadata={"doc": "Models that judge, by names of your own", "unnamed": {}}
    )
    own_digests: list[str] = _doc(
        "Digests of your own functions, and of judges' prompts, that data.reward names; filled in when a configuration "
        "is resolved",
        [],
        unnamed=[],
    )
