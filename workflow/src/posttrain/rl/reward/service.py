"""Client of a user's reward service: posts answers in batches and receives scores (protocol: docs/rewards.md)."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from posttrain.config.services import Service
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.job import checked
from posttrain.rl.reward.network import AddressClient


class ServiceGrader:
    """Grades with a reward service.

    Args:
        section: Section of the configuration, for messages.
        service: The service's settings.

    Raises:
        ConfigError: Its token is not in the environment.
    """

    def __init__(self, section: str, service: Service):
        self._client, self._size = AddressClient(section, service), service.batch_size

    async def grade_all(self, answers: Sequence[Answer]) -> list[Grade | Failure]:
        """Return the grade of each answer or a failure, in order."""
        batches = [answers[start : start + self._size] for start in range(0, len(answers), self._size)]
        replies = await self._client.ask_all([{"answers": [_as_sent(answer) for answer in batch]} for batch in batches])
        return [
            outcome for batch, reply in zip(batches, replies, strict=True) for outcome in self._outcomes(reply, batch)
        ]

    async def probe(self) -> Failure | None:
        """Probe the service with an empty batch; return what is wrong with its reply."""
        (reply,) = await self._client.ask_all([{"answers": []}])
        if isinstance(reply, Failure) or reply == []:
            return reply or None
        return Failure("error", f"expected an empty list for no answers, came {self._client.told(reply)}")

    def _outcomes(self, reply: Any, answers: Sequence[Answer]) -> list[Grade | Failure]:
        count = len(answers)
        if isinstance(reply, Failure):
            return [reply] * count
        if not isinstance(reply, list) or len(reply) != count:
            came = f"a list of {len(reply)}" if isinstance(reply, list) else self._client.told(reply)
            return [Failure("error", f"expected a list of {count}, one for each answer, came {came}")] * count
        return [self._outcome(entry, answer) for entry, answer in zip(reply, answers, strict=True)]

    def _outcome(self, entry: Any, answer: Answer) -> Grade | Failure:
        parts = dict(entry) if isinstance(entry, dict) else {"score": entry}
        score = parts.pop("score", "nothing")
        if not all(map(_is_number, [*parts.values(), *([] if score is None else [score])])):
            allowed = "expected a finite number, null, or an object of these with a score"
            return Failure("error", f"{allowed}, came {self._client.told(json.dumps(entry))}")
        try:
            return checked(Grade(score, parts), answer)
        except ValueError as error:
            return Failure("error", self._client.told(error))


def _as_sent(answer: Answer) -> dict[str, Any]:
    sent = {
        "prompt": list(answer.prompt),
        "response": answer.text,
        "label": answer.label,
        "source": answer.source,
        "columns": dict(answer.columns),
        "num_tokens": answer.num_tokens,
        "is_truncated": answer.is_truncated,
    }
    return {"id": hashlib.sha256(json.dumps(sent, sort_keys=True).encode()).hexdigest()[:32], **sent}


def _is_number(value: object) -> bool:
    # Comparisons with NaN are false, and an integer of 400 digits is no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
