"""A `config.json` with a section for the language model and one for the vision tower, as Qwen3.5 publishes it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.resolved_words import CONFIG_DIR
from tests.support.tiny_checkpoint import QWEN3_5, TINY_QWEN3_5, TINY_QWEN3_5_MOE, make_random_checkpoint
from tests.support.tiny_checkpoint import hub_shapes as shapes_of_transformers

from posttrain.checkpoint.formats.as_transformers import hub_config
from posttrain.checkpoint.formats.config_patch import Change, apply_changes
from posttrain.checkpoint.formats.config_sections import mrope_section
from posttrain.checkpoint.formats.hf_architecture import architecture_of
from posttrain.checkpoint.formats.hf_config import check_config, fixed_values, lost_mtp_layers
from posttrain.checkpoint.formats.tied_copies import read_as, untying_changes
from posttrain.config.families import check_architecture, dimensions
from posttrain.config.load import read_yaml
from posttrain.config.schema import Architecture
from posttrain.config.vision import VisionTower
from posttrain.errors import ConfigError
from posttrain.rl.data.chat import stop_token_ids

# Qwen/Qwen3.5-35B-A3B at 59d61f3c.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_5_moe",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
# Parameters and, in the published form with fused experts, tensors. Sources: the safetensors index of each repository.
SIZES = {"qwen3.5_4b": (4_659_865_088, 738), "qwen3.5_35b_a3b": (35_951_822_704, 1_811)}


def model_of(name: str) -> Architecture:
    """Return the dimensions in config/models."""
    said = read_yaml(CONFIG_DIR / "models" / f"{name}.yaml")["model"]["architecture"]
    return Architecture(**{**said, "vision": VisionTower(**said["vision"])})


def config(arch: Architecture = TINY_QWEN3_5) -> dict[str, Any]:
    return hub_config(arch, fixed_values(arch))


def keys(content: dict[str, Any], arch: Architecture = TINY_QWEN3_5) -> list[str]:
    """Return the keys of the problems but that of the tensors."""
    return [problem.key.removeprefix("config.json: ") for problem in check_config(content, arch, {})][:-1]


def changed(path: str, value: Any, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a file with one value at SECTION.KEY changed; `...` removes it."""
    result = copy.deepcopy(content or config())
    *places, key = path.split(".")
    section = result
    for place in places:
        section = section[place]
    if value is ...:
        section.pop(key)
    else:
        section[key] = value
    return result


@pytest.mark.parametrize("name", SIZES)
def test_the_models_have_the_published_sizes(name: str) -> None:
    arch = model_of(name)
    shapes = shapes_of_transformers(arch)
    fused = {
        f"{tensor.split('.experts.')[0]}.{tensor.rsplit('.', 2)[-2].replace('gate', 'up')}"
        for tensor in shapes
        if "language_model" in tensor and ".experts." in tensor
    }
    single = [tensor for tensor in shapes if not ("language_model" in tensor and ".experts." in tensor)]
    assert (sum(map(math.prod, shapes.values())), len(single) + len(fused)) == SIZES[name]


def test_the_published_file_is_the_model_of_config_models() -> None:
    arch = model_of("qwen3.5_35b_a3b")
    assert architecture_of(PUBLISHED, "config.json") == arch
    assert keys(PUBLISHED, arch) == []
    assert mrope_section(arch) == PUBLISHED["text_config"]["rope_parameters"]["mrope_section"]


@pytest.mark.parametrize("arch", QWEN3_5.values(), ids=QWEN3_5)
def test_a_file_of_ours_is_read_as_it_was_written(arch: Architecture) -> None:
    assert keys(config(arch), arch) == []
    assert architecture_of(config(arch), "config.json") == arch
    without_interval = changed("text_config.full_attention_interval", ..., config(arch))
    assert architecture_of(without_interval, "config.json") == arch


def dimensions_in_file(arch: Architecture) -> Iterator[tuple[str, Any]]:
    spelled = {"n_routed_experts": "num_experts", "num_nextn_predict_layers": "mtp_num_hidden_layers"}
    apart = ("model_type", "vision", "rope_theta", "partial_rotary_factor")
    for name, value in dimensions(arch).items():
        if name not in apart:
            yield f"text_config.{spelled.get(name, name)}", value
    yield "text_config.rope_parameters.rope_theta", arch.rope_theta
    yield "text_config.rope_parameters.partial_rotary_factor", arch.partial_rotary_factor
    yield "text_config.partial_rotary_factor", arch.partial_rotary_factor
    yield from ((f"vision_config.{name}", value) for name, value in dataclasses.asdict(arch.vision).items())
    yield "vision_config.out_hidden_size", arch.hidden_size
    yield "tie_word_embeddings", arch.tie_word_embeddings


@pytest.mark.parametrize("arch", QWEN3_5.values(), ids=QWEN3_5)
def test_each_wrong_dimension_is_found_in_its_section(arch: Architecture) -> None:
    for path, value in dimensions_in_file(arch):
        other = not value if isinstance(value, bool) else value / 2
        found = keys(changed(path, other, config(arch)), arch)
        place, _, word = path.rpartition(".")
        expected = f"{place.removesuffix('.rope_parameters')}.{word}" if place else word
        assert found == [expected], path


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("text_config", ..., "text_config"),
        ("vision_config", ..., "vision_config"),
        ("vision_config", None, "vision_config"),
        ("text_config.attn_output_gate", False, "text_config.attn_output_gate"),
        ("text_config.output_gate_type", "sigmoid", "text_config.output_gate_type"),
        ("text_config.mamba_ssm_dtype", "bfloat16", "text_config.mamba_ssm_dtype"),
        ("text_config.mtp_use_dedicated_embeddings", True, "text_config.mtp_use_dedicated_embeddings"),
        ("text_config.layer_types", ["full_attention"] * 4, "text_config.layer_types"),
        ("text_config.model_type", "qwen3_5_moe_text", "text_config.model_type"),
        ("text_config.dtype", "float16", "text_config.dtype"),
        ("text_config.quantization_config", {"quant_method": "fp8"}, "quantization_config"),
        ("text_config.num_labels", 10**9, "text_config.num_labels"),
        ("text_config.eos_token_id", 64, "text_config.eos_token_id"),
        ("text_config._attn_implementation", "a/b", "text_config._attn_implementation"),
        ("text_config.text_config", {"hidden_size": 8}, "text_config.text_config"),
        ("text_config.validate", 1, "text_config.validate"),
        ("text_config.rope_parameters.rope_type", "yarn", "text_config.rope_type"),
        ("text_config.rope_parameters.mrope_section", [4, 0, 0], "text_config.rope_parameters.mrope_section"),
        ("text_config.rope_parameters.mrope_interleaved", False, "text_config.rope_parameters.mrope_interleaved"),
        ("vision_config.hidden_act", "gelu", "vision_config.hidden_act"),
        ("vision_config.deepstack_visual_indexes", [1], "vision_config.deepstack_visual_indexes"),
        ("vision_config.rope_parameters", {"rope_theta": 5.0}, "vision_config.rope_parameters"),
        ("dtype", "float32", "dtype"),
        ("language_model_only", True, "language_model_only"),
        ("decoder", {"hidden_size": 8}, "decoder"),
    ],
)
def test_what_differs_is_named_once(path: str, value: Any, key: str) -> None:
    assert keys(changed(path, value)) == [key]


@pytest.mark.parametrize(
    ("key", "other", "place"),
    [
        ("partial_rotary_factor", 0.25, "text_config"),
        ("partial_rotary_factor", 0.25, "text_config.rope_parameters"),
        ("partial_rotary_factor", True, "text_config"),
        ("full_attention_interval", 4, "text_config"),
    ],
)
def test_two_places_for_one_value_do_not_contradict(key: str, other: Any, place: str) -> None:
    found = check_config(changed(f"{place}.{key}", other), TINY_QWEN3_5, {})[:-1]
    assert [(problem.code, problem.key) for problem in found] == [
        ("architecture-differs", f"config.json: text_config.{key}")
    ]


def test_a_value_may_stand_in_one_of_two_places() -> None:
    for place in ("text_config", "text_config.rope_parameters"):
        assert keys(changed(f"{place}.partial_rotary_factor", ...)) == []
    content = changed("text_config.partial_rotary_factor", ...)
    content = changed("text_config.rope_parameters.partial_rotary_factor", ..., content)
    assert keys(content) == ["text_config.partial_rotary_factor"]


@pytest.mark.parametrize("path", ["dtype", "text_config.dtype"])
def test_the_precision_may_be_said_in_one_section(path: str) -> None:
    assert keys(changed(path, ...)) == []
    content = changed("dtype", ..., changed("text_config.dtype", ...))
    assert keys(content) == ["dtype"]


def test_a_checkpoint_of_the_text_alone_is_rejected_by_name() -> None:
    content = {**config()["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    found = check_config(content, TINY_QWEN3_5, {})
    assert "section-missing" in [problem.code for problem in found]
    with pytest.raises(ConfigError) as caught:
        architecture_of(content, "c")
    (problem,) = caught.value.problems
    assert (problem.code, "vision tower" in problem.remedy) == ("unknown-model-type", True)


def test_a_model_without_a_vision_tower_is_rejected() -> None:
    content = changed("vision_config.depth", 0)
    with pytest.raises(ConfigError) as caught:
        architecture_of(content, "c")
    assert [problem.key for problem in caught.value.problems] == ["model.architecture.vision.depth"]


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_heads", "num_position_embeddings"])
def test_each_dimension_of_the_tower_is_needed(name: str) -> None:
    vision = dataclasses.replace(TINY_QWEN3_5.vision, **{name: 0})
    found = [problem.key for problem in check_architecture(dataclasses.replace(TINY_QWEN3_5, vision=vision))]
    assert found == [f"model.architecture.vision.{name}"]


def test_heads_of_the_tower_divide_its_width() -> None:
    vision = dataclasses.replace(TINY_QWEN3_5.vision, num_heads=3)
    found = [problem.code for problem in check_architecture(dataclasses.replace(TINY_QWEN3_5, vision=vision))]
    assert found == ["vision-heads-divide-width"]


def test_each_section_is_untied() -> None:
    changes = untying_changes(config())
    assert [change.path for change in changes] == ["/tie_word_embeddings", "/text_config/tie_word_embeddings"]
    untied = read_as(config(), {"lm_head.weight": "x"}, "keep")
    assert keys(untied, dataclasses.replace(TINY_QWEN3_5, tie_word_embeddings=False)) == []
    back = [change.reverse for change in reversed(changes)]
    assert apply_changes(untied, back, "config.json") == config()


def test_a_change_of_a_section_that_is_not_there_is_rejected() -> None:
    with pytest.raises(Exception, match="no section 'text_config'"):
        apply_changes({"text_config": 1}, [Change("replace", "/text_config/a", 1, 2)], "config.json")


def test_lost_mtp_layers_are_counted_in_the_section() -> None:
    without = dataclasses.replace(TINY_QWEN3_5, num_nextn_predict_layers=0)
    lost = lost_mtp_layers(config(), without, {"model.norm.weight": None})  # type: ignore[dict-item]
    assert lost == {"text_config/mtp_num_hidden_layers": 1}
    assert keys(config(), without) == []


def test_the_stop_tokens_may_be_in_the_section(tmp_path: Path) -> None:
    make_random_checkpoint(tmp_path, TINY_QWEN3_5_MOE)
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(tmp_path) == {1}


def test_a_tower_has_square_patches_of_a_number() -> None:
    assert keys(changed("vision_config.patch_size", [16, 16])) == ["vision_config.patch_size"]
    assert architecture_of(changed("vision_config.in_channels", ...), "c").vision == VisionTower(
        **dataclasses.asdict(TINY_QWEN3_5.vision)
    )
