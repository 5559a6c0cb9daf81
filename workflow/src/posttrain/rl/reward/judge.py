"""Grades with a judge model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.config.services import Judge
from posttrain.rl.data.keys import AbsentError
from posttrain.rl.data.messages import PromptTemplate
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.network import AddressClient

_WORDS = {"yes": 1.0, "no": 0.0}
# The verdict is at the end of a reply.
_TAIL = 10_000


class JudgeGrader:
    """Grades by asking a judge.

    Args:
        section: Section of the configuration, for messages.
        judge: The judge's settings.
        prompt: Content of its prompt file.

    Raises:
        ConfigError: Its token is not in the environment, or the prompt names an unknown column.
    """

    def __init__(self, section: str, judge: Judge, prompt: str):
        self._judge, self._client = judge, AddressClient(section, judge, "/chat/completions")
        self._template = PromptTemplate(prompt, f"{section}.prompt_file", needed="response")
        self._pattern = re.compile(judge.verdict_pattern, re.DOTALL)

    async def grade_all(self, answers: Sequence[Answer]) -> list[Grade | Failure]:
        """Return the grade of each answer or a failure, in order.

        A judge whose prompt uses labels does not apply to an answer without one.
        """
        outcomes: list[Grade | Failure | str] = [self._question(answer) for answer in answers]
        asked = [place for place, question in enumerate(outcomes) if isinstance(question, str)]
        replies = await self._client.ask_all([self._body(str(outcomes[place])) for place in asked])
        for place, reply in zip(asked, replies, strict=True):
            outcomes[place] = reply if isinstance(reply, Failure) else self._verdict(reply)
        return [outcome for outcome in outcomes if not isinstance(outcome, str)]

    async def probe(self) -> Failure | None:
        """Probe the judge with one token; return what is wrong with its reply."""
        (reply,) = await self._client.ask_all([self._body("Say yes.", max_tokens=1)])
        if isinstance(reply, Failure):
            return reply
        is_chat = isinstance(reply, dict) and bool(reply.get("choices"))
        return None if is_chat else Failure("error", f"expected a chat completion, came {self._client.told(reply)}")

    def _body(self, question: str, max_tokens: int | None = None) -> dict[str, Any]:
        return {
            "model": self._judge.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": max_tokens or self._judge.max_tokens,
        }

    def _question(self, answer: Answer) -> str | Grade | Failure:
        if answer.label is None and "label" in self._template.columns:
            return Grade(None)
        row = {**answer.columns, "label": answer.label, "prompt": _as_text(answer.prompt)}
        try:
            return self._template.fill(answer.text, row)
        except AbsentError as error:
            return Failure("error", f"the judge's prompt: {error}")

    def _verdict(self, reply: Any) -> Grade | Failure:
        """Return the score of a judge's last verdict."""
        try:
            choice = reply["choices"][0]
            text, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (LookupError, TypeError, AttributeError):
            text, is_cut = None, False
        if not isinstance(text, str):
            return Failure("error", f"expected a chat completion, came {self._client.told(reply)}")
        if is_cut:
            return Failure("error", f"the judge was cut after {self._judge.max_tokens} tokens")
        verdicts = [found[1] for found in self._pattern.finditer(text[-_TAIL:])]
        if not verdicts:
            return Failure("error", f"the judge gave no verdict: {self._client.told(text)}")
        score = _score(verdicts[-1], self._judge.best_verdict)
        if score is None:
            wanted = f"a verdict from 0 to {self._judge.best_verdict:g}, yes or no"
            return Failure("error", f"expected {wanted}, came {self._client.told(verdicts[-1])}")
        return Grade(score)


def _score(verdict: str | None, best: float) -> float | None:
    """Return a verdict as a score; None if it is out of range (11 of 10 is a manipulated or different verdict)."""
    if (word := str(verdict).lower()) in _WORDS:
        return _WORDS[word]
    try:
        number = float(word)
    except ValueError:
        return None
    return number / best if 0 <= number <= best else None


def _as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt as text; a single message without its role."""
    if len(messages) == 1:
        return str(messages[0].get("content") or "")
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
