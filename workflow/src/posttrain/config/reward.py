"""How responses are graded (docs/rewards.md); which grader grades is `data.reward`."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.services import Judge, Service
from posttrain.document import ANY, _doc

THINK_THEN_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
# The graders that the project brings.
BUILT_IN = (
    *("exact_match", "choice", "f1", "math", "math_answer", "math_dapo", "math_deepscaler"),
    *("format", "length", "overlong", "repetition", "reasoning_gym"),
)


@dataclass(frozen=True)
class Reward:
    """How responses are graded."""

    deadline_seconds: float = _doc(
        "A response must be graded within this; its process is killed then", 10.0, exclusive_minimum=0, unnamed=ANY
    )
    num_workers: int = _doc("Processes that grade", 2, minimum=1, unnamed=ANY)
    memory_gib: float = _doc("Memory that each of them may take for an answer", 1.0, exclusive_minimum=0, unnamed=ANY)
    max_failure_share: float = _doc(
        "Share of a step's responses whose grader may fail (deadline, crash, exception): they have no reward and are "
        "counted; more end the run",
        0.05,
        minimum=0,
        maximum=1,
        unnamed=0.05,
    )
    min_own_label: float = _doc(
        "Share of labels that must have full marks when they are the response, before anything is trained",
        0.99,
        minimum=0,
        maximum=1,
        unnamed=ANY,
    )
    max_other_label: float = _doc(
        "Share of labels that may have full marks when another row's is the response",
        0.01,
        minimum=0,
        maximum=1,
        unnamed=ANY,
    )
    max_label_in_prompt: float = _doc(
        "Share of prompts that may contain their own label, beyond those that contain another row's; 1 where the task "
        "is to find the answer in the prompt",
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
    target_tokens: int = _doc("`length`: response length that is best", 1024, minimum=1, unnamed=1024)
    overlong_buffer_tokens: int = _doc(
        "`overlong`: tokens before rollout.max_response_tokens in which the punishment grows to 1; at most all of it",
        4096,
        minimum=1,
        unnamed=4096,
    )
    repetition_ngram: int = _doc(
        "`repetition`: words of the sequences whose repetition is counted", 4, minimum=1, unnamed=4
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
