"""Settings for reading rows."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.data import Data
from posttrain.rl.data.dataset_formats import OWN


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    Args:
        prompt_key: Key of the prompt; empty: column `prompt`, or else that of the recognised format.
        label_key: Key of the label; empty: column `label`, or else that of the recognised format.
        response_key: Key of an offline response, a column besides the label; empty: none.
        system_prompt: Put before the messages, replacing a row's system message.
        prompt_template: Put around the last user message, see `PromptTemplate`.
        duplicates: What happens to a row with messages and tools of an earlier one: "refuse", "keep" or "drop".
        unlabeled: What happens to a row without a label that could be compared with: "refuse" or "drop".
        needs_label: Whether prompts are asked and responses compared, so that a form has labels and no prompt ends with
            an answer; conversations of a calibration pass do.
    """

    prompt_key: str = ""
    label_key: str = ""
    response_key: str = ""
    system_prompt: str = ""
    prompt_template: str = ""
    duplicates: str = "refuse"
    unlabeled: str = "refuse"
    needs_label: bool = True


def reading_of(data: Data) -> Reading:
    """Return a configuration's settings for reading rows."""
    return Reading(
        # The defaults stand for what is recognised, where a file has no such columns.
        prompt_key="" if data.prompt_key == OWN.prompt else data.prompt_key,
        label_key="" if data.label_key == OWN.label else data.label_key,
        response_key=data.response_key,
        system_prompt=data.system_prompt,
        prompt_template=data.prompt_template,
        duplicates=data.duplicates,
        unlabeled=data.unlabeled,
    )
