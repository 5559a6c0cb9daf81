"""Tokenizes the conversations of calibration passes; the job's head node reads them before ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.data.dataset_files import CONVERSATIONS


@dataclass(frozen=True)
class Read:
    """Input of one calibration pass.

    Args:
        samples: Tokens of each conversation.
        num_short: Conversations skipped because they are too short.
    """

    samples: list[tuple[int, ...]]
    num_short: int


def read_pass(config: Config, name: str, tokenizer: ChatTokenizer, folder: Path) -> Read:
    """Return a pass's conversations as tokens: the first ones that are long enough, truncated to the maximum length.

    Raises:
        ConfigError: None is long enough.
    """
    wanted, samples = config.serving.passes[name], list[tuple[int, ...]]()
    num_short = longest = 0
    limit = min(wanted.max_tokens, config.model.architecture.max_position_embeddings)
    for prompt in load_prompts(folder / CONVERSATIONS):
        is_answered = prompt.messages[-1]["role"] == "assistant"
        tokens = tokenizer.render(prompt.messages, prompt.tools, generation_prompt=not is_answered)
        longest = max(longest, len(tokens))
        if len(tokens) >= max(wanted.min_tokens, 2):
            samples.append(tokens[:limit])
        else:
            num_short += 1
        if len(samples) == wanted.num_samples:
            break
    if not samples:
        allowed = f"at most {longest}, the longest of {num_short} conversations in {folder}"
        remedy = "lower it, or give longer conversations"
        raise ConfigError(
            [
                Problem(
                    "conversations-too-short",
                    f"serving.passes.{name}.min_tokens",
                    str(wanted.min_tokens),
                    allowed,
                    remedy,
                )
            ]
        )
    return Read(samples, num_short)


def read_passes(config: Config, tokenizer: ChatTokenizer, conversations: Mapping[str, Path]) -> dict[str, Read]:
    """Return the input of every pass by name; see `read_pass`.

    Raises:
        ConfigError: Some passes have no input; names them.
    """
    found, problems = dict[str, Read](), list[Problem]()
    for name, folder in conversations.items():
        try:
            found[name] = read_pass(config, name, tokenizer, folder)
        except ConfigError as error:
            problems += error.problems
    raise_if_any(problems)
    return found
