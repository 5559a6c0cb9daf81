"""Checks data, chat template and graders together before training.

A run whose labels no grader understands would silently train for days on rewards of 0. So every label is graded as a
response, once to its own prompt and once to another row's: the first must score 1, the second must not. For other
graders, verdicts on a few responses are shown. Findings from prompts and tokenizer alone are reported as warnings.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.config.data import sources_of
from posttrain.config.derived import share_of, uses_engines
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.readable import counted
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.overlap import NUM_WORDS, find_overlaps
from posttrain.rl.data.prompt_lengths import LEFT_OUT, PromptLengths, check_lengths
from posttrain.rl.data.rendered_prompts import check_rendered
from posttrain.rl.evaluation.heldout import EvalTask
from posttrain.rl.evaluation.label_check import NUM_ROWS_TOLD, LabelCheck, check_labels
from posttrain.rl.evaluation.prompt_check import check_prompts, render_all, render_answers
from posttrain.rl.evaluation.shown_verdicts import ShownVerdict, show_verdicts
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scorer
from posttrain.rl.rollout.offline_responses import OfflineResponses
from posttrain.types import Prompt, label_text

NUM_EXAMPLES = 10
# Prefix of suites among the names of sources.
_SUITE = "suite "


@dataclass(frozen=True)
class DataCheck:
    """Findings of the data check.

    Args:
        problems: Reasons to refuse the run.
        warnings: Notes for the user.
        examples: Some rendered prompts, each {"text", "num_tokens", "label", "source"}.
        lengths: Tokens of the prompts: shortest, median, longest.
        left_out: `prompt_id` of each prompt that is too long for training.
        labels: One for each source whose first grader needs labels.
        verdicts: One for each grader that needs none, by source.
    """

    problems: Sequence[Problem]
    warnings: Sequence[Problem]
    examples: Sequence[Mapping[str, Any]]
    lengths: tuple[int, int, int]
    left_out: Sequence[int]
    labels: Sequence[LabelCheck]
    verdicts: Sequence[ShownVerdict]

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as plain JSON types."""
        return {
            "problems": [problem.as_dict() for problem in self.problems],
            "warnings": [problem.as_dict() for problem in self.warnings],
            "examples": list(self.examples),
            "prompt_tokens": dict(zip(("shortest", "median", "longest"), self.lengths, strict=True)),
            LEFT_OUT: list(self.left_out),
            "labels": [vars(check) for check in self.labels],
            "verdicts": [vars(verdict) for verdict in self.verdicts],
        }


def check_data(
    config: Config, folder: Path, train: Sequence[Prompt], heldout: Sequence[Prompt], suites: Sequence[EvalTask] = ()
) -> DataCheck:
    """Check a dataset with the model's tokenizer and the configured graders.

    Args:
        config: The resolved configuration.
        folder: The checkpoint, with tokenizer and chat template.
        train: Prompts to train on.
        heldout: Prompts held out.
        suites: Prompts of the evaluation suites.

    Raises:
        CheckpointError: The tokenizer cannot be used.
        ConfigError: The template rejects a prompt, or an offline response cannot be used for training.
        RuntimeError: Graders failed more often than `reward.max_failure_share` allows.
    """
    chat = ChatTokenizer(folder, config.data.chat_template_kwargs)
    shown = _spread(train, NUM_EXAMPLES)
    lengths = render_all(chat, train, heldout, suites)
    rendered = {prompt.prompt_id: chat.render(prompt.messages, prompt.tools) for prompt in shown}
    prompt_lengths = PromptLengths(train, lengths, config.rollout.max_prompt_tokens)
    too_long, known = check_lengths(prompt_lengths, config.rollout)
    labels, verdicts = asyncio.run(_ask_graders(config, chat, train)) if uses_engines(config) else ([], [])
    labels += asyncio.run(_check_suites(suites))
    given = None
    if not uses_engines(config) and not too_long:
        left_out = set(prompt_lengths.too_long)
        given = OfflineResponses(config, [prompt for prompt in train if prompt.prompt_id not in left_out], chat)
        render_answers(chat, train, given.answer)
    leaks, seen = check_prompts(config, chat, train, heldout, suites, given.answer if given else None)
    return DataCheck(
        problems=[
            *too_long,
            *leaks,
            *(problem for check in labels for problem in _refusals(check, config)),
            *_failing_graders(config, verdicts),
        ],
        warnings=[
            *check_rendered(chat, folder, _spread(train, NUM_EXAMPLES * 10)),
            *known,
            *seen,
            *_overlaps(train, heldout, suites),
            *_one_value([*labels, *verdicts]),
        ],
        examples=[_example(chat, prompt, rendered[prompt.prompt_id]) for prompt in shown],
        lengths=prompt_lengths.summary,
        left_out=prompt_lengths.too_long,
        labels=labels,
        verdicts=verdicts,
    )


def _example(chat: ChatTokenizer, prompt: Prompt, tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "text": chat.tokenizer.decode(list(tokens)),
        "num_tokens": len(tokens),
        "label": prompt.label,
        "source": prompt.source,
    }


async def _ask_graders(
    config: Config, chat: ChatTokenizer, prompts: Sequence[Prompt]
) -> tuple[list[LabelCheck], list[ShownVerdict]]:
    """Return the label check of each source, and the other graders' verdicts."""
    checks = []
    with GraderPool.of(config) as pool:
        scorer = Scorer(config, pool)
        for name in sources_of(config.data):
            rows = [prompt for prompt in prompts if prompt.source == name and prompt.label is not None]
            first = scorer.terms[name][0]
            if rows and scorer.needs_label(first):
                checks.append(await check_labels(scorer, first, rows, config.data.seed))
        return checks, await show_verdicts(config, scorer, chat, prompts)


async def _check_suites(suites: Sequence[EvalTask]) -> list[LabelCheck]:
    """Return the label check of each suite."""
    checks = []
    for suite in suites:
        with GraderPool.of(suite.config) as pool:
            scorer = Scorer(suite.config, pool)
            first = scorer.terms[""][0]
            if scorer.needs_label(first):
                check = await check_labels(scorer, first, suite.prompts, suite.config.evaluation.seed)
                checks.append(dataclasses.replace(check, source=_SUITE + suite.name))
    return checks


def _refusals(check: LabelCheck, config: Config) -> list[Problem]:
    reward, key = config.reward, f"data.sources.{check.source}.reward" if check.source else "data.reward"
    if check.source.startswith(_SUITE):
        key = f"evaluation.suites.{check.source.removeprefix(_SUITE)}.reward"
    problems = []
    if check.own < reward.min_own_label:
        rows = "".join(
            f"\n        row {row['row']}: {label_text(row['label'])!r:.80} scores {row['score']}"
            + (f": {row['why']}" if row["why"] else "")
            for row in check.failing
        )
        value = f"{check.grader} gives full marks to {check.own:.1%} of {check.num_rows} labels as responses:{rows}"
        allowed = f"at least {reward.min_own_label:.1%} (reward.min_own_label)"
        remedy = "name the column of the answer in data.label_key, or a grader that reads such labels"
        problems.append(Problem("label-not-accepted", key, value, allowed, remedy))
    if check.other is not None and check.other > reward.max_other_label:
        rows = "".join(
            f"\n        row {row['row']}: {label_text(row['other'])!r:.60} for {label_text(row['label'])!r:.60}"
            for row in check.confused
        )
        value = f"{check.grader} gives full marks to {check.other:.1%} of labels of other rows:{rows}"
        allowed = f"at most {reward.max_other_label:.1%} (reward.max_other_label)"
        problems.append(
            Problem("other-label-accepted", key, value, allowed, "choose a grader that distinguishes these labels")
        )
    return problems


def _overlaps(train: Sequence[Prompt], heldout: Sequence[Prompt], measured: Sequence[EvalTask]) -> list[Problem]:
    suites: dict[str, list[str]] = {}
    for prompt in heldout:
        suites.setdefault(prompt.source or "held out", []).append(_asked(prompt))
    suites |= {_SUITE + suite.name: [_asked(prompt) for prompt in suite.prompts] for suite in measured}
    found = find_overlaps(suites, map(_asked, train))
    problems = []
    for suite, texts in suites.items():
        of_suite = [overlap for overlap in found if overlap.suite == suite]
        if of_suite:
            pairs = ", ".join(f"{one.place + 1} with {one.trained + 1}" for one in of_suite[:NUM_ROWS_TOLD])
            value = f"{len(of_suite)} of {len(texts)} evaluation prompts share {NUM_WORDS} words in a row: {pairs}"
            remedy = "a model may know their answers from training: leave them out of one of the two"
            problems.append(
                Problem("evaluation-is-trained-on", f"data: {suite}", value, "none that is trained on", remedy)
            )
    return problems


def _failing_graders(config: Config, verdicts: Sequence[ShownVerdict]) -> list[Problem]:
    """Return the graders whose failure share on the few responses exceeds a step's limit."""
    most, problems = config.reward.max_failure_share, []
    for one in verdicts:
        if len(one.failures) > share_of(most, one.num_tried):
            key = f"data.sources.{one.source}.reward" if one.source else "data.reward"
            told = "".join(f"\n        {reason}" for reason in dict.fromkeys(one.failures))
            value = f"{one.grader} failed for {len(one.failures)} of {one.num_tried} responses:{told}"
            allowed = f"at most {most:.1%} (reward.max_failure_share)"
            problems.append(Problem("grader-fails", key, value, allowed, "fix the grader or its service"))
    return problems


def _one_value(checks: Sequence[LabelCheck | ShownVerdict]) -> list[Problem]:
    return [
        Problem(
            "reward-constant",
            "data.reward",
            f"{check.grader} gave one score to every response that was tried",
            "a reward that distinguishes right from wrong",
            "equal rewards have no gradient: check the function",
        )
        for check in checks
        if check.num_scores == 1
    ]


def _asked(prompt: Prompt) -> str:
    """Return the user's messages: a system prompt is the same for all."""
    return "\n".join(str(message.get("content") or "") for message in prompt.messages if message["role"] != "system")


def _spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return some prompts, spread evenly."""
    stride = max(1, len(prompts) // count)
    return list(prompts[::stride][:count])


def print_check(found: DataCheck) -> None:
    """Print the findings that a user wants to see before a first run."""
    console = Console(highlight=False, soft_wrap=True)
    for number, example in enumerate(found.examples, start=1):
        source = f", {example['source']}" if example["source"] else ""
        console.rule(f"prompt {number} of {len(found.examples)}: {counted(example['num_tokens'], 'token')}{source}")
        console.print(example["text"], markup=False)
        console.print(f"label: {label_text(example['label'])}", style="green", markup=False)
    console.rule("what was found")
    shortest, median, longest = found.lengths
    console.print(f"prompts have {shortest} to {longest} tokens, half of them at most {median}")
    for check in found.labels:
        source = f"{check.source}: " if check.source else ""
        other = "" if check.other is None else f", {check.other:.1%} those of other rows"
        console.print(
            f"{source}{check.grader} gives full marks to {check.own:.1%} of {counted(check.num_rows, 'label')}{other}"
            f" (as {check.stated!r})",
            markup=False,
        )
    for shown in found.verdicts:
        _print_verdict(console, shown)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    if not found.problems and not found.warnings:
        console.print("no problems found", style="green")


def _print_verdict(console: Console, shown: ShownVerdict) -> None:
    source = f"{shown.source}: " if shown.source else ""
    console.print(f"{source}{shown.grader}, of {counted(shown.num_tried, 'response')} that were tried:")
    for name, row in (("highest", shown.highest), ("lowest", shown.lowest)):
        if row:
            console.print(f"  {name} score {row['score']:g}: {row['response']!r:.200}", markup=False)
    if shown.failures:
        console.print(f"  no score for {len(shown.failures)}: {shown.failures[0]}", markup=False)
