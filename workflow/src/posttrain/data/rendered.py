"""What rendered prompts show to be wrong, before an engine has seen one.

Every mistake here is silent in training: a model that reads a beginning twice, or no sign that it is its turn, answers
worse than it can, and one that cannot end its answer fills the response limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from posttrain.data.chat import ChatTokenizer, stop_token_ids
from posttrain.errors import Problem
from posttrain.types import Prompt, label_text

# Above this share of prompts, that a label stands in its prompt is no coincidence of small numbers.
MANY = 0.5


def check_rendered(chat: ChatTokenizer, folder: Path, prompts: Sequence[Prompt]) -> list[Problem]:
    """Return what is to be said about template, tokenizer and labels.

    Args:
        chat: Renders prompts.
        folder: The checkpoint, whose config files name the tokens that end a response.
        prompts: Some of those that are trained on.
    """
    return [
        *_generation_prompt(chat, folder, prompts[:1]),
        *_doubled_tokens(chat, folder, prompts),
        *_stop_tokens(chat, folder),
        *_labels_in_prompts(prompts),
    ]


def _generation_prompt(chat: ChatTokenizer, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    for prompt in prompts:
        if chat.render(prompt.messages) == chat.render(prompt.messages, generation_prompt=False):
            allowed = "one that ends with the begin of the assistant's turn where add_generation_prompt is set"
            remedy = "the model is not told that it is its turn: take the chat template of the model's authors"
            yield Problem(f"{folder}: chat template", "no generation prompt", allowed, remedy)


def _doubled_tokens(chat: ChatTokenizer, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    names = {chat.tokenizer.bos_token_id: "beginning", chat.tokenizer.eos_token_id: "end"}
    names.pop(None, None)
    doubled: dict[int, int] = {}
    for prompt in prompts:
        turns = [*prompt.messages, {"role": "assistant", "content": "."}]
        conversation = chat.render(turns, generation_prompt=False)
        for token in {one for one, other in pairwise(conversation) if one == other and one in names}:
            doubled[token] = doubled.get(token, 0) + 1
    for token, count in doubled.items():
        text = chat.tokenizer.decode([token])
        value = f"{text!r} twice in a row in {count} of {len(prompts)} prompts"
        remedy = "take it out of the template, of the tokenizer's post-processor, or of the prompts' texts"
        yield Problem(f"{folder}: {names[token]} token", value, "once", remedy)


def _stop_tokens(chat: ChatTokenizer, folder: Path) -> Iterator[Problem]:
    known = len(chat.tokenizer)
    stops = sorted(stop_token_ids(folder))
    if unknown := [token for token in stops if not 0 <= token < known]:
        value = f"{unknown} of {stops}"
        remedy = "the model cannot end a response by them: correct generation_config.json or config.json"
        yield Problem(f"{folder}: eos_token_id", value, f"tokens of the tokenizer, below {known}", remedy)
    end = chat.tokenizer.eos_token_id
    if end is not None and end not in stops:
        value = f"{stops}, without the tokenizer's own {end} ({chat.tokenizer.eos_token!r})"
        remedy = "where the chat template ends a turn by it, add it to generation_config.json"
        yield Problem(f"{folder}: eos_token_id", value, "the tokens that end a response", remedy)


def _labels_in_prompts(prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Labels of one or two characters stand in many prompts without a meaning; they are not counted."""
    telling = [(prompt, text) for prompt in prompts if len(text := label_text(prompt.label)) > 2]
    inside = [prompt.prompt_id for prompt, text in telling if text in prompt.messages[-1]["content"]]
    if telling and len(inside) > MANY * len(telling):
        value = f"stands in the prompt in {len(inside)} of {len(telling)} rows, first in row {inside[0] + 1}"
        remedy = "take the answer out of the prompt, or check data.prompt_key and data.prompt_template"
        yield Problem("data.label_key", value, f"labels in at most {MANY:.0%} of their prompts", remedy)
