"""Finds prompt fields that the chat template ignores: rendering without such a field gives the same tokens.

A template's source shows which names it reads, but not when: many render only the last turn's reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.errors import CheckpointError, ConfigError
from posttrain.readable import counted
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.types import Prompt

# Of each field: prompts that are rendered without it, and messages of each; fields that are looked at.
NUM_TRIED, NUM_MESSAGES, NUM_FIELDS = 20, 4, 50
# Fields that link messages, which many templates omit on purpose.
LINKS = ("id", "name", "tool_call_id")
TOOLS = "tools"
# Every message needs a role, so it is never left out, and its value is no text that could be extended.
_ROLE = "role"
_ANSWER = "response to learn"


@dataclass(frozen=True)
class UnreadField:
    """A field that does not affect the tokens of some messages.

    Args:
        owner: Role of the messages that have it; "" for the tools of a row.
        name: Of the field.
        num_unread: Messages whose prompt does not change without it.
        num_tried: Messages that were rendered without it.
        num_prompts: Prompts that have it.
    """

    owner: str
    name: str
    num_unread: int
    num_tried: int
    num_prompts: int

    @property
    def is_link(self) -> bool:
        """Whether the field only links messages to each other, as an ID does."""
        return self.name in LINKS

    def __str__(self) -> str:
        of = f" of the {self.owner}" if self.owner else ""
        return (
            f"{self.name!r}{of} ({counted(self.num_prompts, 'prompt')} with it): "
            f"not shown in {self.num_unread} of {self.num_tried} places that were tried"
        )


def find_unread(
    chat: ChatTokenizer, prompts: Sequence[Prompt], answer_of: Callable[[Prompt], Mapping[str, Any]] | None = None
) -> list[UnreadField]:
    """Return the fields of messages, and the tools, that the template leaves out of some prompts.

    Args:
        chat: Renders prompts; each of them, as they are.
        prompts: Training prompts.
        answer_of: Returns the response to learn; None where responses are sampled.
    """
    owners: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts:
        answer = [{**answer_of(prompt), _ROLE: _ANSWER}] if answer_of else []
        turns = [*prompt.messages, *answer]
        # An empty value counts as missing.
        fields = {(str(m[_ROLE]), name) for m in turns for name, value in m.items() if name != _ROLE and value != ""}
        for field in sorted(fields | ({("", TOOLS)} if prompt.tools else set())):
            if field in owners or len(owners) < NUM_FIELDS:
                owners.setdefault(field, []).append(prompt)
    found = []
    for (owner, name), having in owners.items():
        tried = having[:: max(1, len(having) // NUM_TRIED)][:NUM_TRIED]
        tries = [is_unread for prompt in tried for is_unread in _tries(chat, prompt, owner, name, answer_of)]
        if any(tries):
            found.append(UnreadField(owner, name, sum(tries), len(tries), len(having)))
    return found


def _tries(
    chat: ChatTokenizer,
    prompt: Prompt,
    owner: str,
    name: str,
    answer_of: Callable[[Prompt], Mapping[str, Any]] | None,
) -> Iterator[bool]:
    """Yield for each place of a field in a prompt whether the tokens are the same without it."""
    if answer_of and owner == _ANSWER:
        answer = answer_of(prompt)
        yield _is_same(
            *(
                partial(chat.render_answered, prompt.messages, one, prompt.tools)
                for one in (answer, _without(answer, name))
            )
        )
    elif not owner:
        yield _is_same(partial(chat.render, prompt.messages, prompt.tools), partial(chat.render, prompt.messages))
    else:
        places = [place for place, m in enumerate(prompt.messages) if m[_ROLE] == owner and m.get(name, "") != ""]
        for place in places[:NUM_MESSAGES]:
            less = [_without(m, name) if at == place else m for at, m in enumerate(prompt.messages)]
            yield _is_same(*(partial(chat.render, some, prompt.tools) for some in (prompt.messages, less)))


def _is_same(render: Callable[[], object], render_less: Callable[[], object]) -> bool:
    try:
        return render() == render_less()
    except (CheckpointError, ConfigError):
        return False  # the template requires it


def _without(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a message without a field; `content`, which templates need, is doubled instead of removed."""
    if name == "content" and message.get(name):
        return {**message, name: f"{message[name]} {message[name]}"}
    return {field: value for field, value in message.items() if field != name}
