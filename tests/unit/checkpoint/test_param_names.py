import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiny_checkpoint import (
    ALL,
    QWEN3_5,
    TINY,
    TINY_MOONLIGHT,
    TINY_QWEN3_5,
    TINY_SHARING,
    TINY_V32,
    random_tensors,
)

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.param_names import (
    Placement,
    by_hf_name,
    by_key,
    compare_tensors,
    expected_tensors,
    mtp_layer_of,
    optional_copies,
    to_megatron,
)
from posttrain.checkpoint.quantization.tiling import find_misfit
from posttrain.plan.resolve import resolve


@pytest.fixture(scope="module")
def glm5():
    return resolve({"model": "glm5", "site": "local"}, Path("config")).config.model.architecture


def without_mtp(arch):
    return dataclasses.replace(arch, num_nextn_predict_layers=0)


def test_the_full_model_has_its_known_size(glm5):
    tensors = expected_tensors(without_mtp(glm5))
    assert len(tensors) == 59_079
    assert sum(spec.size_bytes for spec in tensors.values()) == 1_487_822_475_264
    biases = {name: spec for name, spec in tensors.items() if spec.dtype == "F32"}
    num_parameters = sum(math.prod(spec.shape) for name, spec in tensors.items() if name not in biases)
    assert num_parameters == 743_911_199_232
    # The bytes above include the router's biases, which are no parameters: 75 layers x 256 experts in FP32.
    assert sum(spec.size_bytes for spec in biases.values()) == 75 * 256 * 4
    assert 2 * num_parameters + 75 * 256 * 4 == 1_487_822_475_264


def test_the_mtp_layer_adds_one_layer_and_four_tensors(glm5):
    extra = set(expected_tensors(glm5)) - set(expected_tensors(without_mtp(glm5)))
    one_layer = {name for name in extra if name.startswith("model.layers.78.")}
    assert extra == one_layer
    names_of_layer_77 = {name for name in expected_tensors(glm5) if name.startswith("model.layers.77.")}
    assert {name.replace(".78.", ".77.", 1) for name in one_layer} - names_of_layer_77 == {
        "model.layers.77.enorm.weight",
        "model.layers.77.hnorm.weight",
        "model.layers.77.eh_proj.weight",
        "model.layers.77.shared_head.norm.weight",
    }


@pytest.mark.parametrize(
    "placement",
    [
        Placement(
            "model.layers.5.mlp.experts.7.up_proj.weight",
            "decoder.layers.5.mlp.experts.experts.linear_fc1.weight",
            "BF16",
            (256, 4096, 6144),
            (((7, 2048, 0), (1, 2048, 6144)),),
            num_stack_axes=1,
        ),
        Placement(
            "model.layers.5.mlp.experts.7.down_proj.weight",
            "decoder.layers.5.mlp.experts.experts.linear_fc2.weight",
            "BF16",
            (256, 6144, 2048),
            (((7, 0, 0), (1, 6144, 2048)),),
            num_stack_axes=1,
        ),
        Placement(
            "model.layers.0.mlp.up_proj.weight",
            "decoder.layers.0.mlp.linear_fc1.weight",
            "BF16",
            (24576, 6144),
            (((12288, 0), (12288, 6144)),),
        ),
        Placement(
            "model.layers.77.mlp.gate.e_score_correction_bias",
            "decoder.layers.77.mlp.router.expert_bias",
            "F32",
            (256,),
            (((0,), (256,)),),
        ),
        Placement(
            "model.layers.78.self_attn.indexer.wq_b.weight",
            "mtp.layers.0.transformer_layer.self_attention.core_attention.indexer.linear_wq_b.weight",
            "BF16",
            (4096, 2048),
            (((0, 0), (4096, 2048)),),
        ),
        Placement(
            "model.layers.78.shared_head.norm.weight",
            "mtp.layers.0.final_layernorm.weight",
            "BF16",
            (6144,),
            (((0,), (6144,)),),
        ),
        Placement(
            "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
            "decoder.layers.3.self_attention.linear_kv_down_proj.weight",
            "BF16",
            (576, 6144),
            (((0, 0), (576, 6144)),),
        ),
    ],
    ids=lambda placement: placement.hf_name,
)
def test_placements_worked_out_by_hand(glm5, placement):
    assert by_hf_name(glm5)[placement.hf_name] == placement


def test_the_full_table_takes_seconds():
    """Names, sizes, gaps and overlaps of 744 billion parameters, from the configuration alone, in a new process."""
    code = (
        "import dataclasses, time; from pathlib import Path; from posttrain.plan.resolve import resolve;"
        "from posttrain.checkpoint.param_names import by_key;"
        "from posttrain.checkpoint.quantization.tiling import find_misfit;"
        "arch = resolve({'model': 'glm5', 'site': 'local'}, Path('config')).config.model.architecture;"
        "arch = dataclasses.replace(arch, num_nextn_predict_layers=0);"
        "started = time.process_time(); table = by_key(arch);"
        "wrong = [k for k, ps in table.items() if find_misfit(ps[0].global_shape, [b for p in ps for b in p.boxes])];"
        "placed = [p for ps in table.values() for p in ps];"
        "print(len(placed), sum(p.size_bytes for p in placed), wrong, time.process_time() - started < 10)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[0] == "59079 1487822475264 [] True"


def test_every_tensor_of_the_full_model_is_covered_exactly_once(glm5):
    _check_cover(glm5)


@pytest.mark.parametrize("arch", (ALL | QWEN3_5).values(), ids=ALL | QWEN3_5)
def test_every_tensor_of_a_family_is_covered_exactly_once(arch):
    _check_cover(arch)


def _check_cover(arch):
    for key, placements in by_key(arch).items():
        shape = placements[0].global_shape
        assert {placement.global_shape for placement in placements} == {shape}
        boxes = [box for placement in placements for box in placement.boxes]
        assert sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)
        assert find_misfit(shape, boxes) == "", key


def test_a_query_with_a_gate_alternates_by_head_on_the_hub_and_by_group_in_megatron():
    arch = dataclasses.replace(
        TINY_QWEN3_5, head_dim=2
    )  # 4 heads in 2 groups: 8 rows of queries and gates, 2 + 2 after
    query = by_hf_name(arch)["model.language_model.layers.1.self_attn.q_proj.weight"]
    assert query.global_shape == (24, 64)
    assert [(start, size) for (start, _), (size, _) in query.boxes] == [
        *((0, 2), (4, 2), (2, 2), (6, 2)),
        *((12, 2), (16, 2), (14, 2), (18, 2)),
    ]


def test_a_delta_nets_projections_are_joined_by_key_head():
    arch = dataclasses.replace(TINY_QWEN3_5, linear_key_head_dim=3, linear_value_head_dim=5)
    table = by_hf_name(arch)
    layer = "model.language_model.layers.0.linear_attn."
    # Two key heads with two value heads each: rows of query 3, key 3, value 10, gate 10, strength 2, decay 2.
    joined = table[f"{layer}in_proj_qkv.weight"]
    assert (joined.key, joined.global_shape) == ("decoder.layers.0.self_attention.in_proj.weight", (60, 64))
    assert [(start, size) for (start, _), (size, _) in joined.boxes] == [
        *((0, 3), (30, 3)),
        *((3, 3), (33, 3)),
        *((6, 10), (36, 10)),
    ]
    decay = table[f"{layer}in_proj_a.weight"]
    assert [(start, size) for (start, _), (size, _) in decay.boxes] == [(28, 2), (58, 2)]
    assert table[f"{layer}A_log"].spec == TensorSpec((4,), "F32")


def test_mtp_tensors_with_names_apart_belong_to_the_layer_after_the_decoder():
    assert {mtp_layer_of(TINY_QWEN3_5, name) for name in expected_tensors(TINY_QWEN3_5) if name.startswith("mtp.")} == {
        4
    }
    assert mtp_layer_of(TINY_QWEN3_5, "model.language_model.layers.3.mlp.up_proj.weight") == 0


def test_the_inverse_leads_back(glm5):
    placements = to_megatron(glm5)
    assert len({placement.hf_name for placement in placements}) == len(placements)
    assert len({(placement.key, placement.boxes) for placement in placements}) == len(placements)
    back = {place.hf_name for places in by_key(glm5).values() for place in places}
    assert back == set(by_hf_name(glm5)) == set(expected_tensors(glm5))


@pytest.mark.parametrize("arch", (ALL | QWEN3_5).values(), ids=ALL | QWEN3_5)
def test_names_and_shapes_are_those_of_transformers(arch):
    found = {
        name: TensorSpec(tuple(tensor.shape), "F32" if tensor.dtype.itemsize == 4 else "BF16")
        for name, tensor in random_tensors(arch, seed=0).items()
    }
    assert found == expected_tensors(arch)
    assert any("indexer" in name for name in found) == (arch in (TINY, TINY_SHARING, TINY_V32))


def test_layers_that_take_a_choice_over_have_no_indexer():
    """Those of GLM-5.2 that choose, as its config.json lists them, and the MTP layer: 57 layers have none."""
    glm52 = dataclasses.replace(TINY, num_hidden_layers=78, index_topk_freq=4, index_skip_topk_offset=3)
    names = set(expected_tensors(glm52))
    choosing = {layer for layer in range(79) if f"model.layers.{layer}.self_attn.indexer.wk.weight" in names}
    assert choosing == {0, 1, 2, *range(6, 78, 4), 78}


def test_without_a_query_latent_queries_have_one_matrix():
    placement = by_hf_name(TINY_MOONLIGHT)["model.layers.1.self_attn.q_proj.weight"]
    key = "decoder.layers.1.self_attention.linear_q_proj.weight"
    assert placement == Placement(placement.hf_name, key, "BF16", (96, 64), (((0, 0), (96, 64)),))
    assert not any("q_a_" in name or "q_b_" in name for name in expected_tensors(TINY_MOONLIGHT))


def test_an_architecture_without_shared_experts_has_none():
    names = expected_tensors(dataclasses.replace(TINY, n_shared_experts=0))
    assert not any("shared_experts" in name for name in names)


def test_differences_are_listed_all_at_once():
    found = expected_tensors(TINY)
    del found["model.norm.weight"]
    found["model.layers.0.rotary.inv_freq"] = TensorSpec((4,), "F32")
    found["lm_head.weight"] = TensorSpec((65, 64), "BF16")
    found["model.layers.1.mlp.gate.e_score_correction_bias"] = TensorSpec((4,), "BF16")
    lines = compare_tensors(TINY, found)
    assert sorted(lines) == [
        "lm_head.weight: BF16 [65, 64], expected BF16 [64, 64]",
        "model.layers.0.rotary.inv_freq: unknown to the architecture, F32 [4]",
        "model.layers.1.mlp.gate.e_score_correction_bias: BF16 [4], expected F32 [4]",
        "model.norm.weight: missing, expected BF16 [64]",
    ]


def test_copies_in_the_mtp_layer_are_allowed_but_not_needed():
    expected = expected_tensors(TINY)
    copies = {copy: expected[original] for copy, original in optional_copies(TINY).items()}
    assert set(copies) == {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert compare_tensors(TINY, expected) == []
    assert compare_tensors(TINY, expected | copies) == []
    wrong = expected | {"model.layers.3.embed_tokens.weight": TensorSpec((1,), "BF16")}
    assert len(compare_tensors(TINY, wrong)) == 1
