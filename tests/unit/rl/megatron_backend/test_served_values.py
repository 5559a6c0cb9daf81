from __future__ import annotations

import json
from pathlib import Path

import torch
from tests.support.hub_tensors import fill
from tests.support.megatron_single import initialize_single_rank, run_gangs, test_config
from tests.support.nan_ranks import NAME
from tests.support.tiny_checkpoint import TINY_QWEN3_5, random_tensors

from posttrain.rl.megatron_backend.model import build_policy
from posttrain.rl.megatron_backend.served_values import ServedValues
from posttrain.rl.megatron_backend.weights import HubWeights


def test_a_nan_of_any_rank_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    """gloo's maximum keeps a NaN of rank 0 and loses that of any other."""
    run_gangs("nan_ranks", {"folder": str(tmp_path)})
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["None"] == ["", ""]
    assert told["largest None"] == [["1.0", "2.0", "-inf"]] * 2
    for having in ("0", "1"):
        assert all(words.startswith(f"{NAME}: holds NaN or infinity") for words in told[having])
        assert all("fork=RUN@STEP" in words for words in told[having])
        assert told[f"largest {having}"] == [["1.0", "nan", "-inf"]] * 2, "not that of rank 0 alone"


def test_what_engines_hold_in_bf16_is_rounded_for_the_trainers_pass_too() -> None:
    name = "linear_attn.norm.weight"
    config = test_config(TINY_QWEN3_5)
    initialize_single_rank(config)
    policy = build_policy(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1 + 2**-12)
    weights = HubWeights(policy.chunks, TINY_QWEN3_5)
    narrow, wide = ServedValues(weights, None, (name,)), ServedValues(weights, None)
    shards = [shard for shard in weights.shards if shard.hf_name.endswith(name)]
    assert len(shards) == 2
    for shard in shards:
        assert narrow.differ(shard)
        assert not wide.differ(shard)
        assert (narrow.of(shard, {}).float() == 1).all()
        assert (wide.of(shard, {}) > 1).all()
        assert narrow.sent_specs[shard.hf_name].dtype == "BF16"


def test_boxes_cover_every_tensor_once_convolutions_too() -> None:
    """A delta net's convolution has three axes, and is held in parts: of queries, keys and values."""
    config = test_config(TINY_QWEN3_5)
    initialize_single_rank(config)
    weights = HubWeights(build_policy(config).chunks, TINY_QWEN3_5)
    fill(weights, random_tensors(TINY_QWEN3_5, 1))
    values = ServedValues(weights, None)
    parts = list(values.parts(values.shards, values.agreed_magnitudes()))
    for name, tensor in weights.gather():
        assert tensor is not None
        expected = tensor.float().reshape(-1, tensor.shape[-1])
        whole = torch.full_like(expected, torch.nan)
        for part in (part for part in parts if part.name == name):
            row, column, rows, columns = part.box
            assert whole[row : row + rows, column : column + columns].isnan().all(), name
            whole[row : row + rows, column : column + columns] = part.values
        assert torch.equal(whole, expected), name
        held = {part.box for part in parts if part.name == name}
        assert values.holders[name].keys() == held, name
    assert any("conv1d" in part.name and part.box.row > 0 for part in parts)
