"""Shows verdicts of graders that labels cannot check: the responses with the highest and the lowest score.

Labels can check the first grader of a source, which decides whether responses pass, if it needs labels. The other
graders have no threshold to check. So a few responses are made, and the reader judges whether their scores are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.data import sources_of
from posttrain.config.reward_sum import Term
from posttrain.config.schema import Config
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.of_environment import NAME
from posttrain.rl.reward.scoring import Scorer
from posttrain.types import Prompt, label_text

# Forms in which a response states an answer, in the order of trial.
STATED = (
    "{label}",
    "\\boxed{{{label}}}",
    "#### {label}",
    "Answer: {label}",
    "<think>\n</think>\n<answer>{label}</answer>",
    "<think>\n</think>\n\\boxed{{{label}}}",
)
# Responses per source and grader; the limit matters because a judge costs money.
NUM_TRIED = 10
# Repetitions that imitate a looping, truncated response.
_REPETITION = "the same again and " * 200


@dataclass(frozen=True)
class ShownVerdict:
    """A grader's verdicts on some responses.

    Args:
        source: Name of the data's source.
        grader: Column of its scores.
        num_tried: Number of responses.
        num_scores: Number of distinct scores.
        highest: {"prompt", "response", "score"} of the response with the highest score; None if none has a score.
        lowest: The same for the lowest score; also None if all scores are equal.
        failures: One reason for each response that the grader failed on.
    """

    source: str
    grader: str
    num_tried: int
    num_scores: int
    highest: Mapping[str, Any] | None
    lowest: Mapping[str, Any] | None
    failures: tuple[str, ...]


async def show_verdicts(
    config: Config, scorer: Scorer, chat: ChatTokenizer, prompts: Sequence[Prompt]
) -> list[ShownVerdict]:
    """Return each such grader's verdicts on a few responses, by source.

    Args:
        config: The resolved configuration.
        scorer: Its graders.
        chat: Counts tokens.
        prompts: Training prompts.
    """
    shown = []
    for source in sources_of(config.data):
        first, *others = scorer.terms[source]
        tried = others if scorer.needs_label(first) else [first, *others]
        # An environment grades what was done in it.
        terms = [term for term in tried if term.grader != NAME]
        rows = [prompt for prompt in prompts if prompt.source == source]
        answers = _tried(config, chat, rows) if rows and terms else []
        shown += [await _shown(scorer, term, answers) for term in terms if answers]
    return shown


def _tried(config: Config, chat: ChatTokenizer, rows: Sequence[Prompt]) -> list[Answer]:
    """Return responses to the first row: its label in all forms, another's label, nothing, the prompt, a repetition."""
    first = rows[0]
    labels = list(dict.fromkeys(label_text(row.label) for row in rows if row.label is not None))
    texts = [form.format(label=label) for label in labels[:1] for form in STATED] if first.label is not None else []
    texts += [*labels[1:2], "", str(first.messages[-1].get("content") or ""), _REPETITION]

    def answer(text: str) -> Answer:
        is_cut = text == _REPETITION
        length = config.rollout.max_response_tokens if is_cut else len(chat.tokenizer.encode(text)) + 1
        return Answer(
            text,
            first.label,
            first.messages,
            first.source,
            first.columns,
            num_tokens=length,
            is_truncated=is_cut,
            is_chat=not first.is_text,
        )

    return [answer(text) for text in texts[:NUM_TRIED]]


async def _shown(scorer: Scorer, term: Term, answers: Sequence[Answer]) -> ShownVerdict:
    scored = [one for (one,) in await scorer.score([[answer] for answer in answers], only=term)]
    rows: list[dict[str, Any]] = [
        {"prompt": answer.prompt[-1].get("content"), "response": answer.text, "score": score}
        for one, answer in zip(scored, answers, strict=True)
        if (score := one.scores[term.column]) is not None
    ]
    rows.sort(key=lambda row: float(row["score"]))
    num_scores = len({row["score"] for row in rows})
    return ShownVerdict(
        source=answers[0].source,
        grader=term.column,
        num_tried=len(answers),
        num_scores=num_scores,
        highest=rows[-1] if rows else None,
        lowest=rows[0] if num_scores > 1 else None,
        failures=tuple(one.failure for one in scored if one.failure),
    )
