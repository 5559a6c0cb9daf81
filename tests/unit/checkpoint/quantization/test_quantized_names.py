"""The list of what is quantised, on the names and shapes of the full model."""

import re
from pathlib import Path

import pytest
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY_QWEN3_5_MOE

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.quantization.quantized_names import Selection, fused_with, tensor_class, unquantized_modules
from posttrain.plan.resolve import resolve

ALL = Selection(num_layers=78)


@pytest.fixture(scope="module")
def glm5():
    arch = resolve({"model": "glm5", "site": "local"}, Path("config")).config.model.architecture
    return expected_tensors(arch)


def counts_of(specs, selection):
    counts = {}
    for name, spec in specs.items():
        kind = tensor_class(name) if selection.includes(name, spec.shape) else "unquantized"
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def test_the_list_on_the_full_model(glm5):
    """Layers 0-2 dense, 3-77 MoE, 78 MTP; per layer 5 matrices of attention and 2 of the indexer."""
    assert counts_of(glm5, ALL) == {
        "attention": 79 * 5,
        "indexer": 79 * 2,
        "dense_mlp": 3 * 3,
        "experts": 76 * 256 * 3,
        "shared_experts": 76 * 3,
        # embedding, norm, head; 2 + 2 + 3 of norms and weights_proj per layer; router and bias; 4 of the
        # MTP layer
        "unquantized": 3 + 79 * (2 + 2 + 3) + 76 * 2 + 4,
    }


def test_the_list_on_qwen3_5():
    """Layers 0 and 2 are delta nets, 1, 3 and the MTP layer attend; the tower of two blocks keeps its precision."""
    specs = expected_tensors(TINY_QWEN3_5_MOE)
    counts = counts_of(specs, Selection(num_layers=4))
    kinds = {"attention": 3 * 4, "delta_net": 2 * 3, "experts": 5 * 4 * 3, "shared_experts": 5 * 3}
    assert {kind: counts[kind] for kind in kinds} == kinds
    assert counts == kinds | {"unquantized": len(specs) - sum(kinds.values())}
    without = counts_of(specs, Selection(num_layers=4, mtp=False, keep_first_layers=1))
    assert without["attention"] == 2 * 4
    assert (without["delta_net"], without["experts"]) == (3, 3 * 4 * 3)


def test_experts_alone_without_the_mtp_layer(glm5):
    counts = counts_of(glm5, Selection(("experts",), num_layers=78, mtp=False))
    assert counts["experts"] == 75 * 256 * 3
    assert set(counts) == {"experts", "unquantized"}


def test_the_first_and_last_layers_keep_their_precision(glm5):
    selection = Selection(num_layers=78, keep_first_layers=4, keep_last_layers=2)
    layers = {name.split(".")[2] for name, spec in glm5.items() if selection.includes(name, spec.shape)}
    assert layers == {str(layer) for layer in (*range(4, 76), 78)}
    selection.check(glm5)


def test_modules_that_match_keep_their_precision(glm5):
    selection = Selection(num_layers=78, keep_modules=(r"\.indexer\.", r"layers\.5\.mlp\.experts\.", "kv_b_proj"))
    counts = counts_of(glm5, selection)
    assert "indexer" not in counts
    assert (counts["attention"], counts["experts"]) == (79 * 4, 75 * 256 * 3)
    selection.check(glm5)
    assert "model.layers.5.mlp.experts.7.up_proj" in unquantized_modules(glm5, selection)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r"mlp\.gate_proj", r"layers\.\d+\.mlp\.gate_proj.*.*layers\.\d+\.mlp\.up_proj"),
        (r"experts\.17\.", r"experts\.17\..*.*experts\.\d+\."),
        ("q_a_proj", r"q_a_proj.*.*kv_a_proj_with_mqa"),
    ],
)
def test_what_engines_compute_as_one_is_not_divided(glm5, pattern, named):
    with rejected("fused-tensors-kept-apart") as refused:
        Selection(num_layers=78, keep_modules=(pattern,)).check(glm5)
    assert re.search(named, str(refused.value))


def test_nothing_to_quantise_is_refused(glm5):
    with rejected("nothing-to-quantize", "2 tensors"):
        ALL.check({name: glm5[name] for name in ("lm_head.weight", "model.norm.weight")})


GOLDEN = {
    "model.embed_tokens.weight": False,
    "lm_head.weight": False,
    "model.norm.weight": False,
    "model.layers.5.input_layernorm.weight": False,
    "model.layers.5.self_attn.q_a_proj.weight": True,
    "model.layers.5.self_attn.q_a_layernorm.weight": False,
    "model.layers.5.self_attn.q_b_proj.weight": True,
    "model.layers.5.self_attn.kv_a_proj_with_mqa.weight": True,
    "model.layers.5.self_attn.kv_b_proj.weight": True,
    "model.layers.5.self_attn.o_proj.weight": True,
    "model.layers.5.self_attn.indexer.wq_b.weight": True,
    "model.layers.5.self_attn.indexer.wk.weight": True,
    "model.layers.5.self_attn.indexer.weights_proj.weight": False,
    "model.layers.5.self_attn.indexer.k_norm.weight": False,
    "model.layers.5.self_attn.indexer.k_norm.bias": False,
    "model.layers.5.mlp.gate.weight": False,
    "model.layers.5.mlp.gate.e_score_correction_bias": False,
    "model.layers.5.mlp.experts.255.gate_proj.weight": True,
    "model.layers.5.mlp.shared_experts.down_proj.weight": True,
    "model.layers.0.mlp.up_proj.weight": True,
    "model.layers.78.eh_proj.weight": False,
    "model.layers.78.enorm.weight": False,
    "model.layers.78.shared_head.norm.weight": False,
    "model.layers.78.mlp.experts.0.down_proj.weight": True,
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_list_by_name(glm5, name):
    assert ALL.includes(name, glm5[name].shape) == GOLDEN[name]


def test_vectors_and_copies_of_the_embedding_are_never_quantized():
    assert not ALL.includes("model.layers.0.mlp.up_proj.weight", (7,))
    assert not ALL.includes("model.layers.78.embed_tokens.weight", (8, 8))
    assert not ALL.includes("model.layers.78.shared_head.head.weight", (8, 8))
    assert not ALL.includes("other.model.layers.0.mlp.up_proj.weight", (8, 8))


def test_modules_that_stay_are_listed_for_the_engine(glm5):
    modules = unquantized_modules(glm5, ALL)
    assert len(modules) == 2 + 79 + 76 + 1
    assert {"model.embed_tokens", "lm_head", "model.layers.78.eh_proj", "model.layers.3.mlp.gate"} <= set(modules)
    assert not any(module.endswith("gate_proj") for module in modules)


def test_matrices_with_the_same_input_are_fused():
    expert = "model.layers.1.mlp.experts.2."
    pair = (f"{expert}gate_proj.weight", f"{expert}up_proj.weight")
    assert fused_with(pair[0]) == fused_with(pair[1]) == pair
    assert fused_with(f"{expert}down_proj.weight") == (f"{expert}down_proj.weight",)
    attention = "model.layers.1.self_attn."
    assert fused_with(f"{attention}kv_a_proj_with_mqa.weight")[0] == f"{attention}q_a_proj.weight"
    assert len(fused_with(f"{attention}k_proj.weight")) == 3


def test_attention_with_grouped_queries_is_on_the_list():
    shape = TensorSpec((8, 8), "BF16").shape
    assert all(ALL.includes(f"model.layers.0.self_attn.{p}_proj.weight", shape) for p in "qkvo")
    assert not ALL.includes("model.layers.0.self_attn.q_norm.weight", (8,))
