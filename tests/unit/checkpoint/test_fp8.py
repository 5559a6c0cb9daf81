import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.checkpoint.fp8 import (
    SMALLEST_SCALE,
    dequantize_block,
    is_quantized,
    quantization_config,
    quantize_block,
    quantize_channel,
    quantize_named,
    quantize_tensor,
    served_specs,
    tensor_class,
    unquantized_modules,
)
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.safetensors_io import TensorSpec
from posttrain.config.load import resolve
from posttrain.errors import CheckpointError

# ---- an independent reference: E4M3 by the definition of its 256 codes, blocks by loops ----


def e4m3_value(code):
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 0xF, code & 0x7
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


MAGNITUDES = np.array([e4m3_value(code) for code in range(0x7F)])


def nearest_code(value):
    """Return the code of the nearest number, of two equally near ones the even code; the sign is kept."""
    magnitude = min(abs(float(value)), 448.0)
    distance = np.abs(MAGNITUDES - magnitude)
    candidates = np.flatnonzero(distance == distance.min())
    code = next((c for c in candidates if c % 2 == 0), candidates[0])
    return int(code) | (0x80 if math.copysign(1.0, value) < 0 else 0)


def reference_block(weight, block):
    weight = weight.float().numpy()
    rows, columns = (math.ceil(n / block) for n in weight.shape)
    codes, scale = np.zeros(weight.shape, np.uint8), np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            where = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            amax = np.abs(weight[where]).max()
            step = max(np.float32(amax) / np.float32(448), np.float32(2.0**-126)) if amax else np.float32(1)
            scale[i, j] = step
            scaled = weight[where] / step
            codes[where] = np.vectorize(nearest_code, otypes=[np.uint8])(scaled)
    return codes, scale


def assert_equals_reference(weight, block=128):
    codes, scale = quantize_block(weight, block)
    expected_codes, expected_scale = reference_block(weight, block)
    assert scale.numpy().tobytes() == expected_scale.tobytes()
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected_codes)


# ---- hand-computed ----


def test_numbers_by_hand():
    codes, scale = quantize_block(torch.tensor([[448.0, -7.0, 0.0, 0.3]]))
    assert codes.float().tolist() == [[448.0, -7.0, 0.0, 0.3125]]
    assert scale.tolist() == [[1.0]]
    codes, scale = quantize_block(torch.tensor([[0.875, 0.0078125]]))
    assert scale.item() == 0.875 / 448 == 2.0**-9
    assert codes.float().tolist() == [[448.0, 4.0]]
    assert dequantize_block(codes, scale).tolist() == [[0.875, 0.0078125]]


def test_a_block_of_zeros_stays_zero_and_its_neighbours_do_not_care():
    weight = torch.zeros(4, 4)
    weight[0, 3] = 7.0
    codes, scale = quantize_block(weight, block=2)
    assert scale.tolist() == [[1.0, 7 / 448], [1.0, 1.0]]
    assert torch.equal(dequantize_block(codes, scale, block=2), weight)


def test_signs_of_zeros_survive():
    weight = torch.tensor([[-0.0, 0.0, 1.0, -1e-30]])
    codes, scale = quantize_block(weight)
    assert codes.view(torch.uint8).tolist() == [[0x80, 0x00, 0x7E, 0x80]]
    assert torch.signbit(dequantize_block(codes, scale)).tolist() == [[True, False, False, True]]


def test_every_code_but_nan_comes_back():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    weight = values[values.isfinite()].reshape(1, -1) * 0.037
    codes, scale = quantize_block(weight, block=512)
    again, scale_again = quantize_block(dequantize_block(codes, scale, 512), block=512)
    assert len(codes[0].view(torch.uint8).unique()) == 254
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(scale, scale_again)


# ---- against the reference ----


def awkward_matrix():
    """257 x 300: ragged at both edges, with a zero block, huge and tiny values, subnormal numbers."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(257, 300, generator=generator)
    weight[:128, :128] = 0.0
    weight[128:256, :128] *= 1e30
    weight[128:256, 128:256] *= 1e-30
    weight[:128, 128:256] *= 1e-41
    weight[256, 256:] *= 1e-37
    weight[5, 290] = 3.0e38
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_equals_a_slow_reference_bit_by_bit(dtype):
    weight = awkward_matrix() if dtype is torch.float32 else awkward_matrix()[120:, 220:]
    limit = torch.finfo(dtype).max
    assert_equals_reference(weight.double().clamp(-limit, limit).to(dtype))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.floats(-44, 38))
def test_equals_the_reference_for_any_shape_and_magnitude(rows, columns, seed, magnitude):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert_equals_reference((weight * 10.0**magnitude).clamp(-3e38, 3e38).float(), block=4)


def test_equals_compressed_tensors_where_the_formats_agree():
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=[128, 128], symmetric=True, dynamic=False
    )
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize_block(weight)
    tiles = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    their_scale, zero_point = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), args)
    theirs = quantize(weight, their_scale, zero_point, args, dtype=torch.float8_e4m3fn)
    assert torch.equal(scale, their_scale)
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))


# ---- invariants ----


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(-30, 30))
def test_the_error_stays_within_its_bound(seed, magnitude):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(20, 30, generator=generator, dtype=torch.float64) * 12 - 12
    weight = (torch.randn(20, 30, generator=generator) * 10.0 ** (spread + magnitude)).float()
    codes, scale = quantize_block(weight, block=8)
    error = (weight.double() - dequantize_block(codes, scale, block=8).double()).abs()
    steps = dequantize_block(torch.ones_like(codes), scale, block=8).double()
    assert (error <= torch.maximum(weight.double().abs() / 16, steps / 1024) * (1 + 1e-6)).all()


def test_a_ragged_edge_equals_the_same_block_alone():
    weight = torch.randn(200, 150)
    codes, scale = quantize_block(weight)
    corner, corner_scale = quantize_block(weight[128:, 128:])
    assert torch.equal(codes[128:, 128:].view(torch.uint8), corner.view(torch.uint8))
    assert torch.equal(scale[1:, 1:], corner_scale)
    assert (codes.shape, scale.shape) == ((200, 150), (2, 2))


def test_tiny_blocks_keep_a_normal_scale_and_their_bound():
    weight = torch.tensor([[1e-40, -3e-39, 5e-36]])
    codes, scale = quantize_block(weight)
    assert scale.item() == SMALLEST_SCALE
    error = (dequantize_block(codes, scale) - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 16, torch.tensor(2.0**-136))).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_with_the_tensors_name(bad):
    weight = torch.zeros(130, 130)
    weight[129, 129] = bad
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: holds NaN or infinity"):
        quantize_named(name, weight)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        codes, scale = quantize_block(weight)
        results.append((codes.view(torch.uint8), scale))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_one_scale_per_row_and_one_for_all():
    weight = torch.tensor([[448.0, 1.0], [0.875, -0.25], [0.0, -0.0]])
    codes, scale = quantize_channel(weight)
    assert scale.tolist() == [[1.0], [2.0**-9], [1.0]]
    assert codes.float().tolist() == [[448.0, 1.0], [448.0, -128.0], [0.0, 0.0]]
    codes, scale = quantize_tensor(weight)
    assert scale.item() == 1.0
    assert codes.float().tolist() == [[448.0, 1.0], [0.875, -0.25], [0.0, 0.0]]


# ---- the list ----


@pytest.fixture(scope="module")
def glm5():
    arch = resolve({"model": "glm5", "site": "local"}, Path("config")).config.model.architecture
    return expected_tensors(arch)


def test_the_list_on_the_full_model(glm5):
    """Layers 0-2 dense, 3-77 MoE, 78 MTP; per layer 5 matrices of attention and 2 of the indexer."""
    counts = {}
    for name, spec in glm5.items():
        kind = tensor_class(name) if is_quantized(name, spec.shape) else "unquantized"
        counts[kind] = counts.get(kind, 0) + 1
    assert counts == {
        "attention": 79 * 5,
        "indexer": 79 * 2,
        "dense_mlp": 3 * 3,
        "experts": 76 * 256 * 3,
        "shared_experts": 76 * 3,
        # embedding, norm, head; 2 + 2 + 3 of norms and weights_proj per layer; router and bias; 4 of the
        # MTP layer
        "unquantized": 3 + 79 * (2 + 2 + 3) + 76 * 2 + 4,
    }


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
    assert is_quantized(name, glm5[name].shape) == GOLDEN[name]


def test_vectors_and_copies_of_the_embedding_are_never_quantized():
    assert not is_quantized("model.layers.0.mlp.up_proj.weight", (7,))
    assert not is_quantized("model.layers.78.embed_tokens.weight", (8, 8))
    assert not is_quantized("model.layers.78.shared_head.head.weight", (8, 8))
    assert not is_quantized("other.model.layers.0.mlp.up_proj.weight", (8, 8))


def test_what_is_served_is_what_was_announced():
    weight = torch.randn(130, 257).bfloat16()
    served = dict(quantize_named("model.layers.0.mlp.up_proj.weight", weight))
    specs = served_specs("model.layers.0.mlp.up_proj.weight", TensorSpec((130, 257), "BF16"))
    assert list(served) == list(specs)
    assert specs["model.layers.0.mlp.up_proj.weight_scale_inv"] == TensorSpec((2, 3), "F32")
    assert [tuple(t.shape) for t in served.values()] == [spec.shape for spec in specs.values()]
    assert [t.dtype for t in served.values()] == [torch.float8_e4m3fn, torch.float32]
    ((name, same),) = quantize_named("lm_head.weight", weight)
    assert name == "lm_head.weight"
    assert same is weight


def test_modules_that_stay_are_listed_for_the_engine(glm5):
    modules = unquantized_modules(glm5)
    assert len(modules) == 2 + 79 + 76 + 1
    assert {"model.embed_tokens", "lm_head", "model.layers.78.eh_proj", "model.layers.3.mlp.gate"} <= set(modules)
    assert not any(module.endswith("gate_proj") for module in modules)
    config = quantization_config(glm5)
    assert config.pop("modules_to_not_convert") == modules
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
