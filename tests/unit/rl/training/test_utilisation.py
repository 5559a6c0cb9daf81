from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch
from tests.support.megatron_single import CONFIG_DIR

from posttrain.plan.resolve import resolve
from posttrain.rl.training.utilisation import PeakMemory, model_flops_utilisation, traced


def test_utilisation_of_a_model_by_hand() -> None:
    """Two sequences of 3 and 5 tokens, of one dense layer: six operations per weight and token, and attention's."""
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    arch = dataclasses.replace(
        config.model.architecture, num_hidden_layers=1, index_n_heads=0, index_head_dim=0, index_topk=0
    )
    model = dataclasses.replace(config.model, architecture=arch)
    hardware = dataclasses.replace(config.hardware, bf16_tflops=2.0)
    config = dataclasses.replace(config, model=model, hardware=hardware)
    attention = 64 * 48 + 48 * 4 * (16 + 8) + 64 * (32 + 8) + 32 * 4 * (16 + 16) + 4 * 16 * 64
    weights = attention + 3 * 64 * 128 + 64 * 64
    pairs = 3 * 4 // 2 + 5 * 6 // 2
    operations = 6 * weights * (3 + 5) + 6 * 4 * (24 + 16) * pairs
    assert model_flops_utilisation(config, [3, 5], seconds=0.5) == pytest.approx(operations / (0.5 * 2e12), rel=1e-12)


def test_a_peak_is_that_of_the_time_since_it_was_reset() -> None:
    memory = PeakMemory()
    memory.reset()
    before = memory.gib()
    held = torch.ones(2**26)  # 256 MiB
    del held
    assert memory.gib() - before == pytest.approx(0.25, abs=0.05)
    memory.reset()
    assert memory.gib() - before < 0.1


def test_a_chosen_step_is_traced_and_no_other(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        with traced(step, {2}, tmp_path / "traces"):
            torch.ones(4, 4) @ torch.ones(4, 4)
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "step_000002.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}
