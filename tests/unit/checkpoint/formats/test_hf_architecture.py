"""What `config.json` says, as transformers writes it for every family, is the model that it was written for."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import ALL, transformers_config

from posttrain.checkpoint.formats.hf_architecture import architecture_of, precision_of
from posttrain.errors import ConfigError

GLM5 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def written(name: str) -> dict[str, object]:
    return json.loads(transformers_config(ALL[name], ALL[name].num_hidden_layers).to_json_string(use_diff=False))


@pytest.mark.parametrize("name", ALL)
def test_each_family_is_read_as_it_was_written(name: str) -> None:
    assert architecture_of(written(name), "config.json") == ALL[name]


def test_older_versions_of_transformers_spell_positions_otherwise() -> None:
    content = written("deepseek_v3_yarn")
    parameters = content.pop("rope_parameters")
    theta = parameters.pop("rope_theta")
    older = {**content, "rope_theta": theta, "rope_scaling": {"type": "yarn", **parameters, "rope_type": None}}
    older["rope_scaling"].pop("rope_type")
    assert architecture_of(older, "config.json") == ALL["deepseek_v3_yarn"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "llama"}, "c: model_type"),
        ({"hidden_size": None}, "c: hidden_size"),
        ({"hidden_size": "64"}, "c: hidden_size"),
        ({"hidden_size": True}, "c: hidden_size"),
        ({"kv_lora_rank": 0}, "model.architecture.kv_lora_rank"),
    ],
)
def test_what_is_no_model_of_ours_is_refused(change: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        architecture_of({**written("glm_moe_dsa"), **change}, "c")
    assert key in str(refused.value)


@pytest.mark.parametrize(
    ("declared", "precision"),
    [
        (None, "bf16"),
        (GLM5, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "nvfp4"),
    ],
)
def test_the_precision_is_what_the_checkpoint_declares(declared: object, precision: str) -> None:
    assert precision_of({"quantization_config": declared}, "config.json") == precision


@pytest.mark.parametrize(
    "declared", [{"quant_method": "awq"}, {"quant_method": "modelopt", "quant_algo": "FP8"}, "gptq"]
)
def test_another_precision_is_refused(declared: object) -> None:
    with rejected("unknown-quantization"):
        precision_of({"quantization_config": declared}, "config.json")


def test_dimensions_of_other_families_are_not_taken_over() -> None:
    """transformers writes keys into `config.json` that a family has no part for."""
    content = {**written("qwen3"), "kv_lora_rank": 32, "n_routed_experts": 8}
    assert dataclasses.asdict(architecture_of(content, "c"))["kv_lora_rank"] == 0


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_routed_experts", "num_nextn_predict_layers"])
@pytest.mark.parametrize("count", [10**9, -1])
def test_counts_that_no_model_has_are_rejected_before_tensors_are_named(key, count):
    with rejected("dimension-out-of-range", count, key=f"model.architecture.{key}"):
        architecture_of(written("glm_moe_dsa") | {key: count}, "config.json")
