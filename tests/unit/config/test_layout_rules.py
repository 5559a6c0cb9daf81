"""Rules about layouts of models that no file of config/models has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from posttrain.config.layout_rules import LAYOUT_RULES
from posttrain.config.schema import Architecture
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"


@pytest.mark.parametrize(
    ("sizes", "code", "key"),
    [
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, "", ""),
        ({"tensor_model_parallel_size": 4}, "", ""),
        ({"tensor_model_parallel_size": 8}, "size-divides-model", "parallel.tensor_model_parallel_size"),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 4},
            "delta-net-heads-per-rank",
            "parallel.context_parallel_size",
        ),
        ({"context_parallel_size": 8}, "delta-net-heads-per-rank", "parallel.context_parallel_size"),
    ],
    ids=str,
)
def test_ranks_share_the_key_heads_of_delta_nets(sizes, code, key):
    arch = Architecture(
        model_type="qwen3_5", vocab_size=64, hidden_size=64, num_hidden_layers=4, intermediate_size=96,
        num_attention_heads=8, num_key_value_heads=8, head_dim=16, rope_theta=1e4, rms_norm_eps=1e-6,
        max_position_embeddings=256, partial_rotary_factor=0.5, full_attention_interval=4, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4,
    )  # fmt: skip
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, architecture=arch),
        parallel=dataclasses.replace(config.parallel, **sizes),
    )
    found = [(problem.code, problem.key) for rule in LAYOUT_RULES for problem in rule(config)]
    about_heads = [each for each in found if each[0] in ("size-divides-model", "delta-net-heads-per-rank")]
    assert about_heads == ([(code, key)] if code else [])
