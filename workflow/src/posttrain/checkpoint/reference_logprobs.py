"""Reference log-probabilities of a checkpoint: a few prompts, and the trainer's values for fixed continuations.

Training writes the file into its last checkpoint; export and quantisation copy it, so it travels with the folder.
`serving.canary` compares servers of the folder with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import CheckpointError, one_line
from posttrain.store import read_json, write_json

CANARY_NAME = "posttrain_canary.json"


@dataclass(frozen=True)
class ReferencePrompt:
    """One conversation with a continuation.

    Args:
        messages: Messages of a chat request; empty if an environment said them.
        tools: JSON schemas of the functions that a response may call; None without tools.
        prompt_tokens: The messages rendered by the model's own chat template.
        response_tokens: The fixed continuation.
        logprobs: Natural-log probability of each response token at temperature 1, by the trainer.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Prompts for a server of these weights, with the expected log-probabilities.

    Args:
        trainer: The trainer's precision: its `trainer.params_dtype`.
        template_kwargs: Further variables of the chat template that rendered the prompts.
        prompts: At least one prompt.
    """

    trainer: str
    template_kwargs: Mapping[str, Any]
    prompts: Sequence[ReferencePrompt]

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("no prompts")
        for place, prompt in enumerate(self.prompts):
            tokens = [*prompt.prompt_tokens, *prompt.response_tokens]
            if not prompt.prompt_tokens or not all(type(token) is int and token >= 0 for token in tokens):
                raise ValueError(f"prompt {place}: no token ids")
            if not prompt.logprobs or len(prompt.logprobs) != len(prompt.response_tokens):
                raise ValueError(f"prompt {place}: not one log-probability for each token")
            if not all(math.isfinite(value) and value <= 0 for value in prompt.logprobs):
                raise ValueError(f"prompt {place}: what is no log-probability")

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> ReferenceLogprobs:
        """Rebuild it from `as_dict`.

        Raises:
            ValueError: `content` is not what `as_dict` returns.
        """
        try:
            prompts = [ReferencePrompt(**prompt) for prompt in content["prompts"]]
            return ReferenceLogprobs(str(content["trainer"]), dict(content["template_kwargs"]), prompts)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a canary: {error!r}") from error


def write_reference_logprobs(folder: Path, canary: ReferenceLogprobs) -> str:
    """Write the reference log-probabilities to a folder, and return the file's name."""
    write_json(folder / CANARY_NAME, canary.as_dict())
    return CANARY_NAME


def read_reference_logprobs(folder: Path) -> ReferenceLogprobs | None:
    """Return a folder's reference log-probabilities; None if it has none.

    Raises:
        CheckpointError: The file is invalid.
    """
    path = folder / CANARY_NAME
    try:
        return ReferenceLogprobs.from_dict(read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        remedy = "take the folder from where it was exported; without this file it is served unseen"
        raise CheckpointError(
            "reference-logprobs-invalid", f"{path}: {one_line(str(error))}\n  remedy: {remedy}"
        ) from error
