"""Converts an engine's tokens to the text that graders get."""

from __future__ import annotations

from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.responses import GenerateResult
from posttrain.rl.reward.answer import Answer
from posttrain.types import Prompt


def answer_of(prompt: Prompt, tokenizer: ChatTokenizer, result: GenerateResult) -> Answer:
    """Return an engine's response as the text that graders get."""
    return Answer(
        text=tokenizer.decode(result.output_ids),
        label=prompt.label,
        prompt=prompt.messages,
        source=prompt.source,
        columns=prompt.columns,
        num_tokens=len(result.output_ids),
        is_truncated=result.finish_reason == "length",
        is_chat=not prompt.is_text,
    )
