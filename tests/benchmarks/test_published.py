"""The step-time model against published systems."""

import dataclasses
from pathlib import Path

import pytest
from benchmarks.published import GOOD, MODELS, NEMO_RL, VLLM, FittedSystem, machine_of, main, step_time_accuracy

from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.flops import sequence_flops
from posttrain.plan.timing import rates
from posttrain.plan.timing.decoding import DecodingGpus, decode_step_seconds
from posttrain.plan.timing.fitted import IDEAL


@pytest.fixture(scope="module")
def glm5():
    return resolve({"model": "glm5", "site": "local"}, Path("config")).config


@pytest.fixture
def h200(glm5):
    return machine_of("H200", glm5.hardware)


def test_the_share_of_the_peak_is_the_fitted_systems(h200):
    """The one unknown from the published median of 3.7 minutes."""
    system = FittedSystem()
    work = system.num_samples * sequence_flops(MODELS["GLM-5"], system.mean_tokens).training(recompute=True)
    share = work / (system.train_gpus * h200.bf16_tflops * 1e12 * system.train_seconds)
    assert share == pytest.approx(rates.COMPUTE_SHARE, rel=1e-3)


def test_time_per_layer_is_that_of_a_single_request(h200):
    """18.31 ms: the first row of `vllm-glm5-b200-deployment.txt`."""
    engine = DecodingGpus(MODELS["GLM-5"], machine_of("B200", h200), 8, "fp8", dp_attention=False)
    assert decode_step_seconds(engine, 1, 2304) == pytest.approx(18.31e-3, rel=1e-3)


def test_the_published_model_is_ours(glm5):
    ours = dataclasses.replace(glm5.model.architecture)
    assert MODELS["GLM-5"] == ours


def test_predictions_hold_or_say_what_is_missing(glm5):
    rows = step_time_accuracy(glm5.hardware)
    assert len(rows) == 18
    for row in rows:
        assert (abs(row.error) > GOOD) == bool(row.missing), f"{row.name}: {row.error:+.1%}"


def test_what_is_missing_is_what_the_text_says(glm5):
    """Without its constant, DeepSeek-V3's steps lack about the same time on 128 GPUs as on 512: a switch of phases."""
    rows = {row.name: row for row in step_time_accuracy(glm5.hardware)}
    ideal = {row.name: row for row in step_time_accuracy(glm5.hardware, IDEAL)}
    lacking = [row.published_seconds - row.predicted_seconds for name, row in ideal.items() if "DeepSeek-V3" in name]
    assert len(lacking) == 4
    assert 20 < min(lacking) < max(lacking) < 50
    # decoding alone is two fifths of a rollout with tools
    assert rows["GLM-5.1, 131k context, 28 H200 nodes: rollout"].error == pytest.approx(-0.60, abs=0.01)
    half, whole = (rows[f"Qwen3-235B-A22B, {count} GB200"] for count in (64, 128))
    assert whole.published_seconds > half.published_seconds
    assert whole.predicted_seconds < half.predicted_seconds


def test_most_predictions_hold(glm5):
    rows = step_time_accuracy(glm5.hardware)
    held = {source: [row for row in rows if row.source == source and not row.missing] for source in (NEMO_RL, VLLM)}
    assert len(held[NEMO_RL]) == 8
    assert len(held[VLLM]) == 5
    assert max(abs(row.error) for row in held[NEMO_RL]) < GOOD
    assert max(abs(row.error) for row in held[VLLM]) < 0.08


def test_the_table_names_every_system_and_what_the_model_lacks(glm5, capsys):
    main()
    printed = capsys.readouterr().out
    for row in step_time_accuracy(glm5.hardware):
        assert row.name in printed
        assert row.missing in printed
