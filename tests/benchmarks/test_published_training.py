"""Attainable rates, and what is lost against them, against published training runs."""

import dataclasses

import pytest
from benchmarks.published import GOOD, MODELS, machine_of
from benchmarks.published_training import ANCHORS, OTHERS, adapter_seconds, forecast, gather_seconds, main

from posttrain.plan.timing import attainable
from posttrain.plan.timing.fitted import FITTED, IDEAL
from posttrain.plan.timing.update_time import Trainer

FORECASTS = [forecast(run) for run in (*ANCHORS, *OTHERS)]


def test_the_figures_that_were_asked_for():
    """GLM-5.2 in MXFP8 and prime-rl's models of 106B and 30B, in the unit of the source."""
    figures = {row.run.name: row.figure / row.run.figure for row in FORECASTS}
    assert figures["prime-rl, glm4.5_air, adapters, rows of 65536, 8 H200"] == pytest.approx(21.5 / 25.1, abs=0.01)
    assert figures["prime-rl, qwen3_30b_a3b, adapters, rows of 65536, 8 H200"] == pytest.approx(28.1 / 29.2, abs=0.01)
    demonstration = "Megatron-Bridge, GLM-5.2, 3072 x 4096 tokens, 192 GB200, MXFP8"
    assert figures[demonstration] == pytest.approx(574 / 499.6, abs=0.01)


@pytest.mark.parametrize("row", FORECASTS, ids=lambda row: row.run.name)
def test_what_is_off_says_what_is_missing(row):
    assert (abs(row.error) > GOOD) == bool(row.run.missing), f"{row.error:+.0%}"


def test_nothing_takes_longer_than_published_at_attainable_rates():
    """A run may lose time that the rates do not know, and never gains any."""
    assert all(forecast(row.run, IDEAL).error < 0 for row in FORECASTS if row.run.slower == 1)


def test_what_is_lost_by_hand(resolved):
    """Of a dense model only products take longer by the first constant, and kernels without products by the second."""
    machine = machine_of("H200", resolved("glm5").config.hardware)
    arch = resolved("qwen3_4b").config.model.architecture
    run = next(row.run for row in FORECASTS if row.run.name.startswith("prime-rl, qwen3_4b, all"))
    ideal, lost = (forecast(run, fitted).causes for fitted in (IDEAL, FITTED))
    assert lost["matrices"] == pytest.approx(FITTED.products * ideal["matrices"])
    assert lost["memory-bound kernels"] == pytest.approx(FITTED.kernel_bytes * ideal["memory-bound kernels"])
    assert lost["attention"] == ideal["attention"]
    trainer = Trainer(arch, machine, 8, num_micro_batches=2)
    gathered = 2 * 3 * 2 * 4_022_468_096 * 7 / 8 / (380e9)
    assert gather_seconds(trainer) == pytest.approx(gathered, rel=1e-6)
    assert lost["gathered weights"] == pytest.approx(FITTED.gathers * gathered, rel=1e-6)


def test_adapters_pass_the_memory_by_hand(resolved):
    """36 layers of Qwen3-4B: q, k, v, o of 4,096 and 1,024 and an MLP of 9,728 beside 2,560; four passes in BF16."""
    machine = machine_of("H200", resolved("glm5").config.hardware)
    arch = resolved("qwen3_4b").config.model.architecture
    elements = 5 * 2560 + 4096 + 9728 + 3 * (4096 + 2 * 1024 + 2560 + 2 * 9728 + 2560)
    moved = 4 * 2 * elements * 36 * 1000 / 8
    trainer = Trainer(arch, machine, 8)
    assert adapter_seconds(trainer, 1000) == pytest.approx(moved / attainable.memory(machine))
    experts = dataclasses.replace(trainer, arch=MODELS["Qwen3-30B-A3B"])
    elements = 3 * 2048 + 4096 + 3 * (4096 + 2 * 512 + 2048) + 8 * (2 * 2048 + 768 + 3 * (2 * 768 + 2048))
    moved = 4 * 2 * elements * 48 * 1000 / 8
    assert adapter_seconds(experts, 1000) == pytest.approx(moved / attainable.memory(machine))


def test_the_table_names_every_run_and_what_costs_most(capsys):
    main()
    printed = capsys.readouterr().out
    for row in FORECASTS:
        assert row.run.name in printed
        assert next(iter(row.causes)) in printed
