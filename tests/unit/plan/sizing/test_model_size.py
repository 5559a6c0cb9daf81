import dataclasses
from pathlib import Path

import pytest
import torch
from tests.support.tiny_checkpoint import QWEN3_5, transformers_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.quantization.fp8 import Fp8Format
from posttrain.checkpoint.quantization.nvfp4 import Nvfp4Format
from posttrain.checkpoint.quantization.quantized_names import Selection
from posttrain.plan.sizing.model_size import (
    count_active_parameters,
    count_parameters,
    decoder_weights,
    edge_weights,
    model_weights,
    mtp_weights,
    parameters_by_component,
    saved_weights,
    vision_weights,
)

MODELS = sorted(path.stem for path in (Path(__file__).resolve().parents[4] / "config" / "models").glob("*.yaml"))
BYTES = {"U8": 1, "BF16": 2, "F32": 4, "F8_E4M3": 1}


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


@pytest.mark.parametrize("model", MODELS)
def test_parameters_equal_those_of_transformers(resolved, model):
    """Each component of each model in config/models; MTP layers and router biases apart."""
    arch = resolved(model).config.model.architecture
    built = model_on_meta(arch)
    counted: dict[str, int] = {}
    for name, tensor in built.named_parameters():
        counted[component_of(name)] = counted.get(component_of(name), 0) + tensor.numel()
    assert parameters_by_component([*model_weights(arch), *vision_weights(arch)]) == counted
    biases = sum(tensor.numel() for name, tensor in built.named_buffers() if "e_score_correction_bias" in name)
    assert sum(weight.num_elements for weight in model_weights(arch) if weight.is_buffer) == biases


@pytest.mark.parametrize(
    ("model", "total"),
    [
        # Counts that the Hub shows, as public repositories quote them.
        ("qwen3_0.6b", 596_049_920),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("glm5", 743_911_199_232),
        ("glm5.1", 743_911_199_232),
    ],
)
def test_published_numbers_of_parameters(resolved, model, total):
    assert count_parameters(model_weights(resolved(model).config.model.architecture)) == total


def test_glm_5_2_has_the_tensors_and_bytes_of_its_repository(resolved):
    """59,585 tensors, 753,329,940,480 numbers (NVIDIA Megatron Bridge, card of GLM-5.2), 1,506,659,919,872 bytes."""
    arch = resolved("glm5.2").config.model.architecture
    weights = [*model_weights(arch), *mtp_weights(arch)]
    assert sum(weight.count for weight in weights) == len(expected_tensors(arch)) == 59_585
    assert sum(weight.num_elements for weight in weights) == 753_329_940_480
    assert sum(weight.bf16_bytes for weight in weights) == 1_506_659_919_872


def test_the_hub_counts_all_that_glm_4_5_air_has(resolved):
    """110,468,824,832: MTP layer, router biases, and the MTP layer's copies of embedding and output matrix."""
    arch = resolved("glm4.5_air").config.model.architecture
    stored = sum(weight.num_elements for weight in [*model_weights(arch), *mtp_weights(arch)])
    assert stored + 2 * 151_552 * 4096 == 110_468_824_832


def test_the_four_layer_model_has_the_size_of_its_repository(resolved):
    """26 GB without an MTP layer (radixark/miles); with one it would be 46."""
    arch = resolved("glm5_4layer").config.model.architecture
    size = sum(weight.bf16_bytes for weight in [*model_weights(arch), *mtp_weights(arch)])
    assert size / 1e9 == pytest.approx(26, abs=0.5)


@pytest.mark.parametrize(
    ("model", "billions"), [("glm5", 40.8), ("glm4.5_air", 12.8), ("qwen3_30b_a3b", 3.04), ("qwen3_4b", 4.02)]
)
def test_active_parameters(resolved, model, billions):
    active = count_active_parameters(resolved(model).config.model.architecture)
    assert active / 1e9 == pytest.approx(billions, abs=0.05)


def test_every_parameter_of_a_tied_dense_model_is_active(resolved):
    """Its embedding is its output matrix, too: 0.6 B of Qwen3-0.6B."""
    assert count_active_parameters(resolved("qwen3_0.6b").config.model.architecture) == 596_049_920


def test_a_tied_embedding_is_one_tensor_unless_stages_part_it(resolved):
    arch = resolved("qwen3_4b").config.model.architecture
    vocabulary = 151_936 * 2560
    _, alone = edge_weights(arch)
    _, last_of_two = edge_weights(arch, num_stages=2)
    assert count_parameters(last_of_two) - count_parameters(alone) == vocabulary
    untied = dataclasses.replace(arch, tie_word_embeddings=False)
    assert count_parameters(model_weights(untied)) - count_parameters(model_weights(arch)) == vocabulary
    assert edge_weights(untied) == edge_weights(untied, num_stages=2)


def test_layers_of_a_model_without_experts_are_all_dense(resolved):
    layers = decoder_weights(resolved("qwen3_4b").config.model.architecture)
    assert {weight.component for layer in layers for weight in layer} == {"attention", "norms", "dense_mlp"}


def test_biases_and_norms_of_glm_4_5(resolved):
    """GLM-4.5 normalises queries and keys, Air does not; both have biases."""
    air = resolved("glm4.5_air").config.model.architecture
    normed = dataclasses.replace(air, use_qk_norm=True)
    unbiased = dataclasses.replace(air, attention_bias=False)
    count = count_parameters(model_weights(air))
    assert count_parameters(model_weights(normed)) - count == 46 * 2 * 128
    assert count - count_parameters(model_weights(unbiased)) == 46 * (96 + 2 * 8) * 128


@pytest.mark.parametrize("model", ["tiny", "glm5", "glm5.2", "moonlight", "deepseek_v3", "qwen3_0.6b"])
def test_bytes_equal_those_of_the_checkpoint_tables(resolved, model):
    arch = resolved(model).config.model.architecture
    specs = expected_tensors(arch)
    weights = [*model_weights(arch), *mtp_weights(arch)]
    assert sum(weight.count for weight in weights) == len(specs)
    assert sum(weight.bf16_bytes for weight in weights) == sum(_size(spec) for spec in specs.values())
    served = [spec for name, found in specs.items() for spec in _served(name, found)]
    assert sum(weight.fp8_bytes for weight in weights) == sum(_size(spec) for spec in served)


@pytest.mark.parametrize("arch", QWEN3_5.values(), ids=QWEN3_5)
def test_bytes_of_delta_nets_gates_and_vision_towers_equal_those_of_the_tables(arch):
    specs, weights = expected_tensors(arch), saved_weights(arch)
    assert sum(weight.count for weight in weights) == len(specs)
    assert sum(weight.bf16_bytes for weight in weights) == sum(_size(spec) for spec in specs.values())
    served = [spec for name, found in specs.items() for spec in _served(name, found)]
    assert sum(weight.fp8_bytes for weight in weights) == sum(_size(spec) for spec in served)
    parts = parameters_by_component(weights)
    # Two delta nets, of 192 channels, 96 values, 2 x 4 heads; kernels of 4; 4 decays and biases; two attentions and
    # that of the MTP layer, of 64 queries and as many gates, 2 x 32 keys and values.
    assert parts["delta_net"] == 2 * ((192 + 96 + 8 + 96) * 64 - 32 * 64 + 160 * 4 + 2 * 4)
    assert parts["attention"] == 3 * (2 * 64 + 2 * 32 + 64) * 64


@pytest.mark.parametrize("model", ["tiny", "glm5", "glm5.2", "moonlight", "deepseek_v3", "qwen3_0.6b", "qwen3_30b_a3b"])
def test_bytes_in_nvfp4_are_those_that_the_quantiser_writes(resolved, model):
    arch = resolved(model).config.model.architecture
    specs, form = expected_tensors(arch), Nvfp4Format(Selection(("experts",), arch.num_hidden_layers, mtp=False))
    served = sum(_size(spec) for name, found in specs.items() for spec in _served(name, found, form))
    weights = model_weights(arch)
    # What drafts stays BF16.
    drafts = sum(weight.bf16_bytes for weight in mtp_weights(arch))
    assert sum(weight.bytes_in("nvfp4") for weight in weights) + drafts == served
    assert [weight.bytes_in("fp32") for weight in weights] == [4 * weight.num_elements for weight in weights]


def _served(name, spec, form=None):
    form = form or Fp8Format()
    return form.served_specs(name, spec).values() if form.selection.includes(name, spec.shape) else [spec]


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


def model_on_meta(arch):
    """Build the model that transformers makes of our dimensions, without memory."""
    with torch.device("meta"):
        auto = AutoModelForImageTextToText if arch.vision.depth else AutoModelForCausalLM
        return auto.from_config(transformers_config(arch, arch.num_hidden_layers))


def component_of(name):
    """Return the component that a parameter of transformers belongs to."""
    for piece, component in (
        ("model.visual.", "vision"),
        ("embed_tokens", "embedding"),
        ("lm_head", "lm_head"),
        (".indexer.", "indexer"),
        ("norm", "norms"),
        ("self_attn.", "attention"),
        ("linear_attn.", "delta_net"),
        ("mlp.experts.", "routed_experts"),
        ("mlp.shared_experts.", "shared_experts"),
        ("mlp.shared_expert.", "shared_experts"),
        ("mlp.shared_expert_gate.", "router"),
        ("mlp.gate.weight", "router"),
        ("mlp.", "dense_mlp"),
    ):
        if piece in name:
            return component
    raise AssertionError(name)


def _size(spec):
    return BYTES[spec.dtype] * torch.Size(spec.shape).numel()
