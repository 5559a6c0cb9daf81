"""Converts an episode's tokens to the text that graders get."""

from __future__ import annotations

from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.environments.protocol import EnvironmentFailure
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.rollout.episode import Episode
from posttrain.types import Prompt


def answer_of(prompt: Prompt, tokenizer: ChatTokenizer, episode: Episode) -> Answer:
    """Return an episode's last response as the text that graders get, and what its environment says."""
    return Answer(
        text=tokenizer.decode(episode.last_response),
        label=prompt.label,
        prompt=prompt.messages,
        source=prompt.source,
        columns=prompt.columns,
        num_tokens=sum(episode.loss_mask),
        is_truncated=episode.finish_reason == "length",
        is_chat=not prompt.is_text,
        environment=_environment_grade(episode),
    )


def _environment_grade(episode: Episode) -> Grade | Failure | None:
    grade = episode.grade
    if isinstance(grade, EnvironmentFailure):
        return Failure(grade.kind, grade.reason)
    return Grade(grade.reward, grade.parts) if grade else None
