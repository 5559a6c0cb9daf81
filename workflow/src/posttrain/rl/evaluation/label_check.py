"""Grades labels as if they were responses: to their own prompts and to others."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.reward_sum import PASSING_SCORE, Term
from posttrain.report.progress import ProgressBar
from posttrain.rl.evaluation.shown_verdicts import STATED
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.scoring import Scored, Scorer
from posttrain.types import Prompt, label_text

# Rows named in a message.
NUM_ROWS_TOLD = 10
# Rows used to choose the form in which a response states an answer.
NUM_TRIED = 32
# Rows graded at a time.
BATCH = 1000


@dataclass(frozen=True)
class LabelCheck:
    """Result of grading one source's labels as responses.

    Args:
        source: Its name.
        grader: The first grader of its reward.
        stated: Form in which a response states the label.
        num_rows: Rows with a label.
        own: Share of rows that score 1 for their own label.
        other: Share of rows that score 1 for another row's different label; None if all labels are equal.
        failing: The first rows that do not score 1, each {"row", "label", "score", "why"}.
        confused: The first rows that score 1 for another's label, each {"row", "label", "other"}.
        num_scores: Number of distinct scores.
    """

    source: str
    grader: str
    stated: str
    num_rows: int
    own: float
    other: float | None
    failing: tuple[Mapping[str, Any], ...]
    confused: tuple[Mapping[str, Any], ...]
    num_scores: int


async def check_labels(scorer: Scorer, term: Term, rows: Sequence[Prompt], seed: int) -> LabelCheck:
    """Grade the label of every row as a response, once to its own row and once to a row with another label.

    Args:
        scorer: Runs the grader.
        term: The grader's term.
        rows: Prompts with labels.
        seed: Seed for choosing the other rows.
    """
    grader, stated = term.column, await _chosen_form(scorer, term, rows[:NUM_TRIED])
    others = _other_labels(rows, seed)
    own: list[Scored] = []
    other: list[Scored | None] = []
    with ProgressBar(f"labels graded by {grader}", len(rows), "rows") as progress:
        for start in range(0, len(rows), BATCH):
            part, theirs = rows[start : start + BATCH], others[start : start + BATCH]
            own += await _graded(scorer, term, part, [prompt.label for prompt in part], stated)
            asked = [(prompt, label) for prompt, label in zip(part, theirs, strict=True) if label is not None]
            found = iter(await _graded(scorer, term, [p for p, _ in asked], [label for _, label in asked], stated))
            other += [next(found) if label is not None else None for label in theirs]
            progress.advance(len(part))
    failing = [place for place, scored in enumerate(own) if not _is_full(scored, grader)]
    confused = [place for place, scored in enumerate(other) if scored is not None and _is_full(scored, grader)]
    num_others = sum(scored is not None for scored in other)
    return LabelCheck(
        source=rows[0].source,
        grader=grader,
        stated=stated,
        num_rows=len(rows),
        own=1 - len(failing) / len(rows),
        other=len(confused) / num_others if num_others else None,
        failing=tuple(_failing(rows[place], own[place], grader) for place in failing[:NUM_ROWS_TOLD]),
        confused=tuple(
            {"row": rows[place].prompt_id + 1, "label": rows[place].label, "other": others[place]}
            for place in confused[:NUM_ROWS_TOLD]
        ),
        num_scores=len({scored.scores[grader] for scored in [*own, *other] if scored is not None}),
    )


async def _chosen_form(scorer: Scorer, term: Term, rows: Sequence[Prompt]) -> str:
    """Return the response form in which most of some labels score 1; the plain form if none does."""
    passed = {}
    for stated in STATED:
        scored = await _graded(scorer, term, rows, [prompt.label for prompt in rows], stated)
        passed[stated] = sum(_is_full(one, term.column) for one in scored)
        if passed[stated] == len(rows):
            return stated
    return max(passed, key=lambda stated: passed[stated])


async def _graded(
    scorer: Scorer, term: Term, prompts: Sequence[Prompt], labels: Sequence[Any], stated: str
) -> list[Scored]:
    answers = [
        Answer(
            stated.format(label=label_text(label)),
            prompt.label,
            prompt.messages,
            prompt.source,
            prompt.columns,
            num_tokens=1,
        )
        for prompt, label in zip(prompts, labels, strict=True)
    ]
    return [scored for (scored,) in await scorer.score([[answer] for answer in answers], only=term)]


def _other_labels(rows: Sequence[Prompt], seed: int) -> list[Any]:
    """Return for each row another row's label with a different text; None if all labels are equal."""
    texts = [label_text(prompt.label) for prompt in rows]
    if len(set(texts)) == 1:
        return [None] * len(rows)
    places = list(range(len(rows)))
    random.Random(f"other labels, seed {seed}").shuffle(places)
    found = []
    for text, place in zip(texts, places, strict=True):
        while texts[place] == text:
            place = (place + 1) % len(rows)
        found.append(rows[place].label)
    return found


def _is_full(scored: Scored, grader: str) -> bool:
    score = scored.scores[grader]
    return score is not None and score >= PASSING_SCORE


def _failing(prompt: Prompt, scored: Scored, grader: str) -> dict[str, Any]:
    return {
        "row": prompt.prompt_id + 1,
        "label": prompt.label,
        "score": scored.scores[grader],
        "why": scored.failure,
    }
