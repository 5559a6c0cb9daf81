from __future__ import annotations

import logging
from pathlib import Path

import pytest

from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.rl.algorithm.mismatch import Mismatch
from posttrain.rl.training.loop import progress_note
from posttrain.rl.training.mismatch import MismatchError, heed_mismatch, share_of_limit

ROOT = Path(__file__).parents[4]


def config_of(overrides: str = "", model: str = "tiny") -> Config:
    return resolve({"model": model, "site": "local", "set": overrides}, ROOT / "config").config


def apart(nats: float) -> Mismatch:
    return Mismatch(abs_diff_mean=nats, abs_diff_max=9.0, kl_k3=9.0, effective_sample_size=0.0)


@pytest.mark.parametrize(
    ("overrides", "model", "own", "served", "share"),
    [
        # FP8 weights served, computed in FP32 on both sides: limits 0.1 and 1e-4.
        ("", "tiny", 0.0129, 1.2e-7, 0.129),
        ("", "tiny", 0.0129, None, 0.129),
        ("", "tiny", 0.71, 1e-7, 7.1),
        ("", "tiny", 0.0129, 0.029, 290.0),
        # The trainer's FP32 weights are BF16 in the engine; on the weights served both compute in FP32.
        ("rollout.fp8=false", "tiny", 0.001, 1e-7, 0.02),
        ("rollout.fp8=false", "tiny", 0.029, None, 0.58),
        ("rollout.fp8=false", "tiny", 1e-7, 0.029, 290.0),
        ("rollout.fp8=false engine.kind=sglang engine.python=/x", "tiny", 0.001, 1.5e-7, 0.02),
        ("rollout.fp8=false trainer.params_dtype=bf16", "tiny", 0.025, 0.01, 0.5),
        ("rollout.fp8=false engine.dtype=bfloat16", "tiny", 0.025, 0.01, 0.5),
        ("trainer.params_dtype=bf16", "tiny", 0.01, 0.1, 2.0),
        # SGLang's FP8 kernels round activations, too.
        ("", "glm5", 0.01, 0.05, 0.5),
        ("rollout.fp8=false", "glm5", 0.01, 0.05, 1.0),
        ("trainer.mismatch.quantised=0.01 trainer.mismatch.fp32=0.5", "tiny", 0.02, 0.05, 2.0),
    ],
)
def test_the_coarsest_precision_decides_the_limit(
    overrides: str, model: str, own: float, served: float | None, share: float
) -> None:
    found = share_of_limit(config_of(overrides, model), apart(own), None if served is None else apart(served))
    assert found == pytest.approx(share)


def test_at_the_limit_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("trainer.mismatch.action=stop trainer.mismatch.quantised=0.125")
    heed_mismatch(config, 0, apart(0.125), apart(1e-7))
    assert caplog.records == []
    with pytest.raises(MismatchError, match=r"step 1: .* 1 times further"):
        heed_mismatch(config, 0, apart(0.12501), apart(1e-7))


def test_another_engines_weights_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        heed_mismatch(config_of(), 4, apart(0.71), apart(1.5e-7))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for piece in ("step 5", "7.1 times", "0.71 nats", "1.5e-07 with the weights served", "(0.1, 0.0001)"):
        assert piece in record.getMessage()


def test_or_the_end_with_what_to_do() -> None:
    with pytest.raises(MismatchError, match=r"7\.1 times") as raised:
        heed_mismatch(config_of("trainer.mismatch.action=stop"), 4, apart(0.71), None)
    assert "remove train/rollouts/step_000004" in str(raised.value)
    assert "trainer.mismatch.action=warn" in str(raised.value)
    assert "weights served" not in str(raised.value), "what was not measured is not told"


def test_the_progress_line_is_loud_above_the_limit() -> None:
    metrics = {"rollout/reward_mean": 0.25, "mismatch/share_of_limit": 1.0}
    assert progress_note(metrics) == "reward 0.250"
    assert progress_note({**metrics, "mismatch/share_of_limit": 7.104}) == "reward 0.250, MISMATCH 7.1 x its limit"
    assert progress_note({}) == "reward 0.000"
    assert progress_note({"train/loss": 2.0, "train/perplexity": 7.389}) == "perplexity 7.389", "of given responses"
