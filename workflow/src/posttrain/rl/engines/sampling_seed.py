"""Derives the seed of a sampled response from the response's identity alone.

A response has the same random numbers in any batch, engine or attempt, so a resumed run equals an undisturbed
one.
"""

from __future__ import annotations

import hashlib
import json


def sampling_seed(seed: int, step_or_tag: int | str, prompt_id: int, sample_index: int, attempt: int = 0) -> int:
    """Return the seed for sampling one response, or the rest of one.

    Args:
        seed: Seed of the run (`training.seed`) or of the evaluation (`evaluation.seed`).
        step_or_tag: The training step, or a name ("heldout") outside of training.
        prompt_id: `Prompt.prompt_id`.
        sample_index: `Trajectory.sample_index`.
        attempt: Number of requests that sampled earlier tokens of the response, or failed.

    Returns:
        A number in [0, 2**31), the range of SGLang's `sampling_seed`.
    """
    name = json.dumps([seed, step_or_tag, prompt_id, sample_index, *([attempt] if attempt else [])])
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
