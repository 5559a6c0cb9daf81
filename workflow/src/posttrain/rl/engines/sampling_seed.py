"""The seed of one sampled response, from what names the response and nothing else.

A response keeps its random numbers whatever batch, engine or attempt it is sampled in. That is what lets a
resumed run equal the undisturbed one.
"""

from __future__ import annotations

import hashlib
import json


def sampling_seed(seed: int, step_or_tag: int | str, prompt_id: int, sample_index: int) -> int:
    """Return the seed that an engine samples one response with.

    Args:
        seed: Of the run (`training.seed`) or of the evaluation (`evaluation.seed`).
        step_or_tag: The training step, or a name for what is no step ("heldout").
        prompt_id: `Prompt.prompt_id`.
        sample_index: `Sample.sample_index`.

    Returns:
        A number in [0, 2**31), as SGLang's `sampling_seed` takes it.
    """
    name = json.dumps([seed, step_or_tag, prompt_id, sample_index])
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
