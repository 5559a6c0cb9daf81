"""Checks rendered prompts: those that the template rejects, fields that it drops, and labels in prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.config.data import GENERATED, sources_of
from posttrain.config.schema import Config
from posttrain.config.suites import data_of
from posttrain.errors import CheckpointError, ConfigError, Problem, raise_if_any
from posttrain.report.progress import ProgressBar
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.dataset_files import HELDOUT, TRAIN
from posttrain.rl.data.label_leak import check_leak
from posttrain.rl.data.unread_fields import find_unread
from posttrain.rl.evaluation.heldout import EvalTask
from posttrain.rl.rollout.conversation import continuation, drops_thinking
from posttrain.types import Prompt

log = logging.getLogger(__name__)
# Rejected rows named in a message.
NUM_NAMED = 5


def render_all(
    chat: ChatTokenizer, train: Sequence[Prompt], heldout: Sequence[Prompt], suites: Sequence[EvalTask]
) -> list[int]:
    """Return each training prompt's token count; other prompts are only checked to render.

    Raises:
        ConfigError: The template rejects prompts; names their rows, messages and reasons.
    """
    files = {TRAIN: train, HELDOUT: heldout} | {f"suite {suite.name}": suite.prompts for suite in suites}
    render = {name: _lengths(chat, name, prompts) for name, prompts in files.items()}
    raise_if_any([problem for _, problem in render.values() if problem])
    return render[TRAIN][0]


def _lengths(chat: ChatTokenizer, name: str, prompts: Sequence[Prompt]) -> tuple[list[int], Problem | None]:
    lengths, wrong = list[int](), list[str]()
    with ProgressBar(f"prompts of {name} rendered", len(prompts), "prompts") as progress:
        for row, prompt in enumerate(prompts, start=1):
            try:
                lengths.append(len(chat.render(prompt.messages, prompt.tools)))
            except CheckpointError as error:
                wrong.append(f"row {row}: {error}")
            progress.advance(1)
    return lengths, _not_rendered(name, wrong, len(prompts)) if wrong else None


def render_answers(
    chat: ChatTokenizer, train: Sequence[Prompt], answer_of: Callable[[Prompt], Mapping[str, Any]]
) -> None:
    """Render every offline response.

    Raises:
        ConfigError: The template rejects some of them.
    """
    wrong = []
    for row, prompt in enumerate(train, start=1):
        try:
            chat.render_answered(prompt.messages, answer_of(prompt), prompt.tools)
        except (CheckpointError, ConfigError) as error:
            wrong.append(f"row {row}: {error}")
    raise_if_any([_not_rendered(f"responses of {TRAIN}", wrong, len(train))] if wrong else [])


def _not_rendered(name: str, wrong: Sequence[str], num_prompts: int) -> Problem:
    rows = "".join(f"\n        {row}" for row in wrong[:NUM_NAMED])
    more = f"\n        and {len(wrong) - NUM_NAMED} more" if len(wrong) > NUM_NAMED else ""
    value = f"{len(wrong)} of {num_prompts} rows that the chat template does not take:{rows}{more}"
    remedy = "correct these rows, or set model.chat_template to a template that takes them"
    return Problem("rows-not-rendered", name, value, "messages and tools as the template reads them", remedy)


def check_prompts(
    config: Config,
    chat: ChatTokenizer,
    train: Sequence[Prompt],
    heldout: Sequence[Prompt],
    suites: Sequence[EvalTask],
    answer_of: Callable[[Prompt], Mapping[str, Any]] | None,
) -> tuple[list[Problem], list[Problem]]:
    """Return the problems that refuse a run, and notes.

    Args:
        config: The resolved configuration.
        chat: Renders prompts.
        train: Prompts to train on.
        heldout: Prompts held out.
        suites: Prompts of the suites.
        answer_of: Returns a prompt's offline response; None if responses are sampled.
    """
    problems: list[Problem] = []
    warnings = list(_unread(chat, train, answer_of))
    for key, prompts in _sides(config, train, heldout, suites).items():
        refused, known = check_leak(key, prompts, config.reward.max_label_in_prompt)
        problems += refused
        warnings += known
    if config.data.environment:
        warnings += _of_turns(config, chat)
    return problems, warnings


def _of_turns(config: Config, chat: ChatTokenizer) -> list[Problem]:
    """Return what the template does to the turns of an episode.

    Raises:
        CheckpointError: No turn can follow a sampled response.
    """
    continuation(chat, [{"role": "user", "content": "a"}], last_token=-1)
    if not drops_thinking(chat):
        return []
    key, history = "environment.history", config.environment.history
    allowed = "either; the chat template leaves the thinking of earlier turns out"
    remedy = "keep trains on turns that see earlier thinking; template trains on segments as a server would show them"
    return [Problem("template-drops-thinking", key, history, allowed, remedy)]


def _unread(
    chat: ChatTokenizer, train: Sequence[Prompt], answer_of: Callable[[Prompt], Mapping[str, Any]] | None
) -> list[Problem]:
    found = find_unread(chat, train, answer_of)
    for field in found:
        if field.is_link:
            log.info("%s", field)
    lost = [str(field) for field in found if not field.is_link]
    if not lost:
        return []
    remedy = "set model.chat_template to a template that shows them, or rename or remove them"
    return [
        Problem(
            "fields-not-rendered",
            "prompts",
            "\n        ".join(["", *lost]),
            "fields that the chat template shows",
            remedy,
        )
    ]


def _sides(
    config: Config, train: Sequence[Prompt], heldout: Sequence[Prompt], suites: Sequence[EvalTask]
) -> dict[str, Sequence[Prompt]]:
    """Return label key -> labelled prompts for each origin, except generated ones."""
    sides: dict[str, Sequence[Prompt]] = {}
    for name, data in sources_of(config.data).items():
        if data.kind not in GENERATED:
            section = f"data.sources.{name}" if name else "data"
            for side, prompts in (("", train), (" (held out)", heldout)):
                sides[f"{section}.label_key{side}"] = [prompt for prompt in prompts if prompt.source == name]
    for suite in suites:
        if data_of(config.evaluation.suites[suite.name]).kind not in GENERATED:
            sides[f"evaluation.suites.{suite.name}.label_key"] = suite.prompts
    return sides
