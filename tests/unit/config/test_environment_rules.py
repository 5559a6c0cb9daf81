"""Rules of environments."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.load import merge

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"
OFFLINE = "rollout.num_samples_per_prompt=1 training.objective=sft rollout.temperature=1.0"
CALCULATOR = "data.environment=calculator data.reward=environment"
PYTHON = "data.environment=python data.reward=environment"
KEY = "data.environment"


def resolve(settings: str):
    return merge({"model": "tiny", "site": "local", "set": settings}, CONFIG_DIR).config


@pytest.mark.parametrize(
    ("settings", "code", "key", "datum"),
    [
        (f"{KEY}=calculater", "unknown-environment", KEY, "calculator"),
        (f"{KEY}=ftp://host:1", "not-an-address", KEY, "http://"),
        (f"{KEY}=http://", "not-an-address", KEY, "http://"),
        (f"{KEY}=http://me:secret@host:1", "not-an-address", KEY, "***"),
        (f"{KEY}=missing.py:Guess data.reward=environment", "environment-unreadable", KEY, "missing.py"),
        (f"{CALCULATOR} environment.max_turn_tokens=99999", "turn-exceeds-episode", "environment.max_turn_tokens", "8"),
        (f"{CALCULATOR} {OFFLINE}", "not-for-supervised", KEY, "leave it out"),
        (f"{KEY}=calculator", "reward-without-environment", "data.reward", "exact_match"),
        ("data.reward=environment", "reward-of-another-kind", "data.reward", "environment"),
        (
            f"{CALCULATOR} environment.history=template algorithm.preset=bnpo",
            "segments-of-micro-batches",
            "algorithm.loss_aggregation",
            "token_mean",
        ),
        (
            f"{CALCULATOR} environment.tool_call_parser=glm47",
            "parser-of-sglang",
            "environment.tool_call_parser",
            "json",
        ),
        (f"{CALCULATOR} environment.tool_call_parser=glm74", "unknown-parser", "environment.tool_call_parser", "glm47"),
        (
            f"{PYTHON} sandbox.seconds=12",
            "deadline-below-programs",
            "environment.deadline_seconds",
            "at least 72: 4 programs",
        ),
        ("environment.max_turns=3", "unused-value", "environment.max_turns", "16"),
        ("environment.history=template", "unused-value", "environment.history", "keep"),
    ],
)
def test_what_has_no_meaning_is_rejected(settings: str, code: str, key: str, datum: str) -> None:
    with rejected(code, datum, key=key) as caught:
        resolve(settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "environment.num_workers=8 environment.memory_gib=1 environment.deadline_seconds=5",
        f"{CALCULATOR} environment.max_turns=3 environment.max_turn_tokens=4",
        PYTHON,
        f"{PYTHON} sandbox.seconds=12 environment.deadline_seconds=72",
        f"{CALCULATOR} environment.deadline_seconds=5",
        f"{KEY}=http://node7:8000/env data.reward=environment+0.1*length",
    ],
)
def test_what_is_accepted(settings: str) -> None:
    assert not resolve(settings).environment.digest
