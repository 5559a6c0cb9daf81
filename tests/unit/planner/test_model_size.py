import dataclasses

import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from posttrain.checkpoint.fp8 import served_specs
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.planner.model_size import (
    count_active_parameters,
    count_parameters,
    model_weights,
    mtp_weights,
    parameters_by_component,
)

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


def test_glm5_has_the_published_number_of_parameters_tensors_and_bytes(resolved):
    arch = resolved("glm5").config.model.architecture
    weights = model_weights(arch)
    assert count_parameters(weights) == 743_911_199_232
    assert sum(weight.count for weight in weights) == 59_079
    # Two bytes each, and four for each of the 75 x 256 router biases.
    assert sum(weight.bf16_bytes for weight in weights) == 1_487_822_475_264 == 2 * 743_911_199_232 + 4 * 75 * 256


def test_glm5_active_parameters(resolved):
    arch = resolved("glm5").config.model.architecture
    active = count_active_parameters(arch)
    # By hand: all but the embedding and the idle 248 of 256 experts in 75 layers.
    expert = 3 * 6144 * 2048
    assert active == 743_911_199_232 - 154_880 * 6144 - 75 * 248 * expert == 40_833_126_912


def test_components_of_glm5_by_hand(resolved):
    parts = parameters_by_component(model_weights(resolved("glm5").config.model.architecture))
    assert parts["routed_experts"] == 75 * 256 * 3 * 6144 * 2048
    assert parts["shared_experts"] == 75 * 3 * 6144 * 2048
    assert parts["dense_mlp"] == 3 * 3 * 6144 * 12288
    assert parts["router"] == 75 * 256 * 6144
    assert parts["embedding"] == parts["lm_head"] == 154_880 * 6144
    assert parts["indexer"] == 78 * (32 * 128 * 2048 + 6144 * (128 + 32) + 2 * 128)
    assert parts["norms"] == 78 * (2 * 6144 + 2048 + 512) + 6144
    query, key_value, output = 64 * 256 * 2048, 64 * (192 + 256) * 512, 64 * 256 * 6144
    assert parts["attention"] == 78 * (query + key_value + output + 6144 * (2048 + 512 + 64))
    assert sum(parts.values()) == 743_911_199_232


def test_parameters_equal_those_of_transformers(resolved):
    arch = resolved("tiny").config.model.architecture
    fields = {key: value for key, value in dataclasses.asdict(arch).items() if key != "model_type"}
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**fields, n_group=1, topk_group=1))
    named = dict(model.named_parameters())
    parts = parameters_by_component(model_weights(arch))
    assert sum(parts.values()) == sum(tensor.numel() for tensor in named.values())
    for component, piece in {
        "indexer": ".indexer.",
        "routed_experts": "mlp.experts.",
        "router": "mlp.gate.weight",
    }.items():
        assert parts[component] == sum(tensor.numel() for name, tensor in named.items() if piece in name)


@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_bytes_equal_those_of_the_checkpoint_tables(resolved, model):
    arch = resolved(model).config.model.architecture
    specs = expected_tensors(arch)
    weights = [*model_weights(arch), *mtp_weights(arch)]
    assert sum(weight.count for weight in weights) == len(specs)
    assert sum(weight.bf16_bytes for weight in weights) == sum(_size(spec) for spec in specs.values())
    served = [spec for name, found in specs.items() for spec in served_specs(name, found).values()]
    assert sum(weight.fp8_bytes for weight in weights) == sum(_size(spec) for spec in served)


def test_a_model_without_indexer_and_shared_experts(resolved):
    arch = resolved("tiny").config.model.architecture
    plain = dataclasses.replace(
        arch, model_type="deepseek_v3", index_n_heads=0, n_shared_experts=0, num_nextn_predict_layers=0
    )
    parts = parameters_by_component(model_weights(plain))
    assert "indexer" not in parts
    assert "shared_experts" not in parts
    assert mtp_weights(plain) == []
    assert sum(parts.values()) == 292_352 - 17_536 - 18_432


def _size(spec):
    return BYTES[spec.dtype] * torch.Size(spec.shape).numel()
