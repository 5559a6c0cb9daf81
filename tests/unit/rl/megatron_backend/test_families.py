"""The table of names and the converted checkpoints of every family, in the hands of Megatron Core's own models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.folders_in_parts import make_folder
from tests.support.megatron_single import CONFIG_DIR, initialize_single_rank, run_ranks, test_config
from tests.support.tiny_checkpoint import FAMILIES, make_random_checkpoint

from posttrain.checkpoint.formats.torch_dist import Conversion
from posttrain.checkpoint.param_names import by_key
from posttrain.config.schema import Architecture
from posttrain.plan.resolve import resolve

ROOT = Path(__file__).parents[4]
# Dimensions: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    routed_scaling_factor=2.5,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_nextn_predict_layers=1,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=163840,
)
LAYOUTS = {
    "one_rank": {},
    "tensor": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1},
    "expert": {"expert_model_parallel_size": 2},
}


def architecture_of(model: str) -> Architecture:
    if model == "deepseek_v3":
        return DEEPSEEK_V3
    return resolve({"model": model, "site": "local"}, CONFIG_DIR).config.model.architecture


# ---- names and shapes, at full size ----


# Up to ten seconds: GLM-5 has 20,000 experts, and each is a module.
@pytest.mark.parametrize(
    "model", [*("glm5", "deepseek_v3", "glm4.5_air"), *("qwen3_30b_a3b", "qwen3_4b", "qwen3.5_35b_a3b", "qwen3.5_4b")]
)
def test_names_and_shapes_are_those_that_megatron_gives_the_full_model(model):
    """All layers and experts, built without memory: GLM-5's 744 billion parameters take seconds."""
    arch = architecture_of(model)
    config = test_config(arch)
    initialize_single_rank(config)
    from tests.support.megatron_families import OnMeta, build_model, sharded_tensors

    with OnMeta():
        built = build_model(config)
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    shards = sharded_tensors(built)
    # The vision tower is carried along, and no part of a GPT model.
    assert {shard.key: tuple(shard.global_shape) for shard in shards} == {
        key: placements[0].global_shape
        for key, placements in by_key(arch).items()
        if not key.startswith("vision_model.")
    }
    # One shard of Megatron's per projection of an expert: the stack and the join of gate and up are the table's.
    found = {(s.key, tuple(s.global_offset), tuple(s.local_shape)) for s in shards if ".experts.experts." in s.key}
    assert found == {
        (placement.key, offsets, sizes[1:])
        for key, placements in by_key(arch).items()
        for placement in placements
        for offsets, sizes in placement.boxes
        if ".experts.experts." in key
    }


# ---- values, loaded in every layout ----


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, str]:
    """A random checkpoint of each family, converted."""
    root = tmp_path_factory.mktemp("families")
    return {family: str(convert_family(root / family, arch)) for family, arch in FAMILIES.items()}


def convert_family(root: Path, arch: Architecture, seed: int = 2) -> Path:
    make_random_checkpoint(root / "hf", arch, seed)
    make_folder(Conversion(root / "hf", "s1", arch), root / "torch_dist", num_parts=2)
    return root


WHOLE_PROOFS = {"pipeline": pytest.mark.faults("layouts")}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=WHOLE_PROOFS.get(name, ())) for name in LAYOUTS])
def test_converted_checkpoints_load_and_compute_the_same(converted, layout):
    ranks = 1 if layout == "one_rank" else 2
    # Megatron refuses to split the experts of a model without any.
    families = {family: arch for family, arch in FAMILIES.items() if layout != "expert" or arch.n_routed_experts}
    folders = {family: converted[family] for family in families}
    request = {"root": str(ROOT), "folders": folders, "parallel": LAYOUTS[layout]}
    outputs = run_ranks(ROOT / "tests/support/family_layouts.py", ranks, json.dumps(request))
    results = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    for family, arch in families.items():
        assert [result[family]["unequal"] for result in results] == [[]] * ranks, family
        differences = [r[family]["logits_difference"] for r in results if "logits_difference" in r[family]]
        if not arch.kv_lora_rank:
            assert differences, family
            assert max(differences) <= 1e-5, family
