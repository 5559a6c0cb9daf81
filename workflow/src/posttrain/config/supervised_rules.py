"""Rules of SFT runs: sampling must be switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from posttrain.config.data import GENERATED
from posttrain.config.derived import uses_engines
from posttrain.config.schema import Config
from posttrain.errors import Problem

Problems = Iterator[Problem]


def _rollout(config: Config) -> Problems:
    if uses_engines(config):
        return
    rollout = config.rollout
    for key, value, wanted, why in (
        ("num_samples_per_prompt", rollout.num_samples_per_prompt, 1, "a row has one response"),
        ("temperature", rollout.temperature, 1.0, "log-probabilities are the model's own"),
        ("fp8", rollout.fp8, False, "no engine serves its weights while it trains"),
    ):
        if value != wanted:
            needed = str(wanted).lower()
            remedy = f"--config recipe=sft, which sets it, or set='rollout.{key}={needed}'"
            allowed = f"{needed} with training.objective=sft: {why}"
            yield Problem("not-for-supervised", f"rollout.{key}", str(value).lower(), allowed, remedy)


def _responses(config: Config) -> Problems:
    # Graders of this kind compare labels only; there is no text around the labels to learn.
    data = config.data
    if not uses_engines(config) and data.kind in GENERATED and data.response_key:
        allowed = f"'' with data.kind={data.kind}, whose label is the response"
        yield Problem("label-is-the-response", "data.response_key", repr(data.response_key), allowed, "leave it out")


SUPERVISED_RULES: tuple[Callable[[Config], Problems], ...] = (_rollout, _responses)
