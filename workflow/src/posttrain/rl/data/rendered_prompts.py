"""Checks rendered prompts for template and tokenizer mistakes before training.

These mistakes are silent in training: with a duplicate BOS token or no generation prompt a model answers worse, and a
model that cannot end its answer fills the response limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from posttrain.errors import CheckpointError, Problem
from posttrain.rl.data.chat import ChatTokenizer, stop_token_ids
from posttrain.types import Prompt


def check_rendered(chat: ChatTokenizer, folder: Path, prompts: Sequence[Prompt]) -> list[Problem]:
    """Return notes about template and tokenizer.

    Args:
        chat: Renders prompts.
        folder: The checkpoint, whose config files name the tokens that end a response.
        prompts: Some of those that are trained on.
    """
    return [
        *_generation_prompt(chat, folder, prompts[:1]),
        *_doubled_tokens(chat, folder, prompts),
        *_stop_tokens(chat, folder),
        *_end_of_turn(chat, folder),
    ]


def _generation_prompt(chat: ChatTokenizer, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    for prompt in prompts:
        if chat.render(prompt.messages) == chat.render(prompt.messages, generation_prompt=False):
            allowed = "one that ends with the begin of the assistant's turn where add_generation_prompt is set"
            remedy = "nothing marks the start of the model's turn: use the chat template of the model's authors"
            yield Problem("no-generation-prompt", f"{folder}: chat template", "no generation prompt", allowed, remedy)


def _doubled_tokens(chat: ChatTokenizer, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    names = {chat.tokenizer.bos_token_id: "beginning", chat.tokenizer.eos_token_id: "end"}
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
        yield Problem("token-doubled", f"{folder}: {names[token]} token", value, "once", remedy)


def _stop_tokens(chat: ChatTokenizer, folder: Path) -> Iterator[Problem]:
    known = len(chat.tokenizer)
    stops = sorted(stop_token_ids(folder))
    if unknown := [token for token in stops if not 0 <= token < known]:
        value = f"{unknown} of {stops}"
        remedy = "the model cannot end a response by them: correct generation_config.json or config.json"
        yield Problem(
            "stop-token-unknown", f"{folder}: eos_token_id", value, f"tokens of the tokenizer, below {known}", remedy
        )
    end = chat.tokenizer.eos_token_id
    if end is not None and end not in stops:
        value = f"{stops}, without the tokenizer's own {end} ({chat.tokenizer.eos_token!r})"
        remedy = "where the chat template ends a turn by it, add it to generation_config.json"
        yield Problem("stop-token-missing", f"{folder}: eos_token_id", value, "the tokens that end a response", remedy)


def _end_of_turn(chat: ChatTokenizer, folder: Path) -> Iterator[Problem]:
    """Yield that no token with which the template ends an answer ends a response."""
    try:
        end = chat.end_of_answer()
    except CheckpointError:
        return  # a template for single turns
    if end is None:
        return
    stops = stop_token_ids(folder)
    tokens = chat.tokenizer.encode(end, add_special_tokens=False)
    if stops.isdisjoint(tokens):
        # Invalid token ids are reported above.
        names = ", ".join(f"{token} ({chat.tokenizer.decode([token])!r})" for token in sorted(stops) if token >= 0)
        value = f"{end.strip() or end!r} ends an answer in the chat template, and none of it is a stop token: {names}"
        allowed = "a template that ends an answer with a stop token"
        remedy = (
            "a model that ends its answers so would fill the response limit: add the token to eos_token_id in the "
            "checkpoint's generation_config.json, or set model.chat_template to one that ends with a stop token"
        )
        yield Problem("turn-never-ends", f"{folder}: chat template", value, allowed, remedy)
