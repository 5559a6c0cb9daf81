import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.checkpoint import fp8
from posttrain.checkpoint.fp8 import (
    SMALLEST_SCALE,
    Fp8Format,
    dequantize,
    dequantize_block,
    quantize_block,
    quantize_channel,
    quantize_named,
    quantize_stream,
    quantize_tensor,
)
from posttrain.checkpoint.safetensors_io import TensorSpec
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


def reference_codes(quotients):
    """Return what `nearest_code` does for many FP32 numbers: a code ends where the middle to the next one is."""
    middles = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
    magnitude = np.minimum(np.abs(quotients.astype(np.float64)), 448.0)
    below, above = np.searchsorted(middles, magnitude, side="left"), np.searchsorted(middles, magnitude, side="right")
    codes = np.where(below % 2 == 0, below, above)  # on a middle they differ: the even one
    return (codes | np.where(np.signbit(quotients), 0x80, 0)).astype(np.uint8)


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


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
def test_half_a_million_weights_in_bf16_have_the_codes_of_a_division(strategy):
    """A product with the reciprocal of the scale differs for one code in 1,500 of BF16 weights."""
    rows, columns = 4096, 128
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(11)).bfloat16()
    values = weight.float().numpy()
    tiles = {"block": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[strategy]
    amax = np.abs(values).reshape(rows // tiles[0], tiles[0], columns).max(axis=(1, 2))
    expected_scale = np.repeat(amax / np.float32(448), tiles[0])[:, None]
    codes, scale = getattr(fp8, f"quantize_{strategy}")(weight)
    expected = reference_codes(values / expected_scale)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected)
    np.testing.assert_array_equal(scale.reshape(-1).numpy(), expected_scale[:: tiles[0], 0])
    if strategy != "tensor":  # whose one scale has no such weight
        assert (reference_codes(values * (np.float32(1) / expected_scale)) != expected).sum() > 100


def test_the_fast_reference_is_the_slow_one():
    numbers = np.concatenate([MAGNITUDES, (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2, np.geomspace(1e-4, 500, 300)])
    both = np.concatenate([numbers, -numbers]).astype(np.float32)
    np.testing.assert_array_equal(reference_codes(both), [nearest_code(number) for number in both])


# Largest magnitude -> (weight, its code as a number).
BY_HAND = {
    # 3/4 of it is 336, the middle of 320 and 352, of which 320 is even; a product with 1 / scale is 336.00003.
    1.078125: [(0.80859375, 320.0), (-0.80859375, -320.0), (0.050537109375, 20.0), (1.078125, 448.0)],
    # A scale of 1: middles between neighbours, down to the smallest.
    448.0: [
        (1.0625, 1.0),
        (1.1875, 1.25),
        (3.75, 3.75),
        (2.0**-10, 0.0),
        (3 * 2.0**-10, 2.0**-8),
        (-464.0 / 2, -224.0),
    ],
}


@pytest.mark.parametrize("amax", BY_HAND)
def test_codes_by_hand(amax):
    weights, expected = zip(*BY_HAND[amax], strict=True)
    codes, scale = quantize_tensor(torch.tensor([[*weights, amax]]))
    assert scale.item() == np.float32(amax) / np.float32(448)
    assert codes.float().tolist() == [[*expected, 448.0]]


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


def test_the_bits_do_not_depend_on_how_many_rows_are_worked_on_at_a_time(monkeypatch):
    weight = awkward_matrix()
    whole = [quantize_block(weight), quantize_channel(weight), quantize_tensor(weight)]
    monkeypatch.setitem(fp8.SLAB_ELEMENTS, "cpu", 1)
    pieces = [quantize_block(weight), quantize_channel(weight), quantize_tensor(weight)]
    for (codes, scale), (other_codes, other_scale) in zip(whole, pieces, strict=True):
        assert torch.equal(codes.view(torch.uint8), other_codes.view(torch.uint8))
        assert torch.equal(scale, other_scale)


def test_a_source_in_fp32_is_left_as_it_was():
    weight = awkward_matrix()
    before = weight.clone()
    for quantize in (quantize_block, quantize_channel, quantize_tensor):
        quantize(weight)
        assert torch.equal(weight, before)


@pytest.mark.parametrize("quantize", [quantize_block, quantize_channel, quantize_tensor])
def test_ten_thousand_tensors_hold_no_nan(quantize):
    """Random shapes and magnitudes, with zeros, subnormal numbers and the largest number mixed in."""
    numbers = np.random.default_rng(7)
    special = np.array([0.0, -0.0, 1e-45, -1e-40, 3.4028235e38, -3.4028235e38, 1.1754944e-38], np.float32)
    for _ in range(10_000 // 3 + 1):
        shape = tuple(numbers.integers(1, 6, size=2))
        weight = (numbers.standard_normal(shape) * 10.0 ** numbers.uniform(-44, 37)).astype(np.float32)
        chosen = numbers.random(shape) < 0.2
        weight[chosen] = numbers.choice(special, size=chosen.sum())
        codes, scale = quantize(torch.from_numpy(weight))
        assert not ((codes.view(torch.uint8) & 0x7F) == 0x7F).any()
        assert torch.isfinite(scale).all()
        assert torch.isfinite(dequantize(codes, scale)).all()


# ---- powers of two ----


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(-44, 38))
def test_a_scale_is_the_next_power_of_two_and_codes_are_made_for_it(seed, magnitude):
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = (weight * 10.0**magnitude).clamp(-3e38, 3e38).float()
    codes, scale = quantize_block(weight, block=8, power_of_two=True)
    free = quantize_block(weight, block=8)[1]
    expected = [[2.0 ** math.ceil(math.log2(value)) for value in row] for row in free.double().tolist()]
    assert scale.double().tolist() == expected
    scaled = weight.double() / dequantize_block(torch.ones_like(codes), scale, block=8).double()
    expected_codes = np.vectorize(nearest_code, otypes=[np.uint8])(scaled.numpy())
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected_codes)


def test_a_scale_that_is_a_power_of_two_stays():
    codes, scale = quantize_block(torch.tensor([[448.0, 3.0]]), power_of_two=True)
    assert scale.tolist() == [[1.0]]
    assert codes.float().tolist() == [[448.0, 3.0]]
    assert quantize_block(torch.zeros(1, 1), power_of_two=True)[1].tolist() == [[1.0]]


TOP = 2.0**120


@pytest.mark.parametrize(
    ("weight", "code"),
    [
        (255.9999847 * TOP, 240.0),  # the largest number of FP32
        (248.0 * TOP, 240.0),  # the middle of 240 and 256, of which the even one is 256
        (247.9 * TOP, 240.0),
        (232.0 * TOP, 224.0),
        (231.0 * TOP, 224.0),
        (225.0 * TOP, 224.0),
        (-255.0 * TOP, -240.0),
    ],
)
def test_the_largest_weights_stay_finite_under_a_power_of_two(weight, code):
    codes, scale = quantize_block(torch.tensor([[weight, 1.0 * TOP, -3.0 * TOP]]), power_of_two=True)
    assert scale.tolist() == [[TOP]]
    assert codes.float().tolist() == [[code, 1.0, -3.0]]
    back = dequantize_block(codes, scale)
    assert back.tolist() == [[code * TOP, TOP, -3 * TOP]]
    assert abs(back[0, 0].item() - weight) <= abs(weight) / 16


def test_below_them_every_code_is_used():
    """224 x 2^120 is 448 x 2^119: the scale is one power less, and no code is cut off at 240."""
    codes, scale = quantize_block(torch.tensor([[224.0 * TOP, 128.0 * TOP]]), power_of_two=True)
    assert scale.tolist() == [[TOP / 2]]
    assert codes.float().tolist() == [[448.0, 256.0]]
    codes, scale = quantize_block(torch.tensor([[3.4028235e38]]))
    assert codes.float().tolist() == [[448.0]]
    assert torch.isfinite(dequantize_block(codes, scale)).all()


def test_a_shared_scale_that_is_too_small_cuts_off_and_makes_no_nan():
    """The conversion to E4M3 may make NaN of what lies beyond 448 (torch's on a CPU does not)."""
    codes, scale = quantize_tensor(torch.tensor([[448.0, 1000.0, -1e30, 3e38]]), amax=torch.tensor(448.0))
    assert scale.item() == 1.0
    assert codes.view(torch.uint8).tolist() == [[0x7E, 0x7E, 0xFE, 0x7E]]


# ---- one scale per row, one for all ----


def test_one_scale_per_row_and_one_for_all():
    weight = torch.tensor([[448.0, 1.0], [0.875, -0.25], [0.0, -0.0]])
    codes, scale = quantize_channel(weight)
    assert scale.tolist() == [[1.0], [2.0**-9], [1.0]]
    assert codes.float().tolist() == [[448.0, 1.0], [448.0, -128.0], [0.0, 0.0]]
    codes, scale = quantize_tensor(weight)
    assert scale.item() == 1.0
    assert codes.float().tolist() == [[448.0, 1.0], [0.875, -0.25], [0.0, 0.0]]


def test_rows_and_tensors_equal_blocks_of_the_same_extent():
    weight = awkward_matrix()
    codes, scale = quantize_channel(weight)
    for row in (0, 200, 256):
        expected, expected_scale = quantize_block(weight[row : row + 1], block=512)
        assert torch.equal(codes[row : row + 1].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale[row : row + 1], expected_scale)
    codes, scale = quantize_tensor(weight)
    expected, expected_scale = quantize_block(weight, block=512)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale[0, 0])


@pytest.mark.parametrize("quantize", [quantize_channel, quantize_tensor])
def test_rows_and_tensors_refuse_what_is_not_finite(quantize):
    weight = torch.ones(3, 3)
    weight[2, 1] = torch.nan
    with pytest.raises(CheckpointError, match="w: holds NaN or infinity"):
        quantize(weight, "w")


# ---- the format ----


UP, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
SHAPES = {"block": (2, 3), "channel": (130, 1), "tensor": ()}


@pytest.mark.parametrize("strategy", SHAPES)
def test_what_is_served_is_what_was_announced(strategy):
    weight, served = torch.randn(130, 257).bfloat16(), Fp8Format(strategy)
    made = dict(quantize_named(UP, weight, served))
    specs = served.served_specs(UP, TensorSpec((130, 257), "BF16"))
    suffix = "_scale_inv" if strategy == "block" else "_scale"
    assert list(made) == list(specs) == [UP, UP + suffix]
    assert specs[UP + suffix] == TensorSpec(SHAPES[strategy], "F32")
    assert [tuple(t.shape) for t in made.values()] == [spec.shape for spec in specs.values()]
    assert [t.dtype for t in made.values()] == [torch.float8_e4m3fn, torch.float32]
    assert ((dequantize(*made.values()) - weight.float()).norm() / weight.float().norm()).item() < 0.04
    ((name, same),) = quantize_named("lm_head.weight", weight, served)
    assert name == "lm_head.weight"
    assert same is weight


def test_matrices_that_an_engine_joins_share_the_scale_of_a_tensor():
    tensors = {"lm_head.weight": torch.ones(4, 4), GATE: torch.ones(4, 4), UP: 3 * torch.ones(4, 4)}
    served = dict(quantize_stream(tensors.items(), Fp8Format("tensor")))
    assert list(served) == ["lm_head.weight", GATE, f"{GATE}_scale", UP, f"{UP}_scale"]
    assert served[f"{GATE}_scale"] == served[f"{UP}_scale"] == np.float32(3) / np.float32(448)
    alone = dict(quantize_stream({GATE: tensors[GATE]}.items(), Fp8Format("tensor")))
    assert alone[f"{GATE}_scale"] == np.float32(1) / np.float32(448)


SPECS = {UP: TensorSpec((8, 8), "BF16"), "lm_head.weight": TensorSpec((8, 8), "BF16"), "n": TensorSpec((8,), "BF16")}


@pytest.mark.parametrize("scale", ["fp32", "power_of_two"])
def test_blocks_are_declared_as_deepseeks(scale):
    expected = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    declared = Fp8Format("block", scale).quantization_config(SPECS)
    assert declared == expected | ({"scale_fmt": "ue8m0"} if scale == "power_of_two" else {})


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_rows_and_tensors_are_declared_as_compressed_tensors_reads_them(strategy):
    from compressed_tensors.quantization import QuantizationConfig

    declared = Fp8Format(strategy).quantization_config(SPECS)
    read = QuantizationConfig.model_validate(declared)
    weights = read.config_groups["group_0"].weights
    assert (weights.num_bits, weights.type, weights.strategy, weights.dynamic) == (8, "float", strategy, False)
    assert read.config_groups["group_0"].input_activations.dynamic
    assert (read.format, read.ignore, read.quantization_status) == ("float-quantized", ["lm_head"], "compressed")
    assert "scale_fmt" not in declared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", SHAPES)
def test_a_gpu_makes_the_same_bytes(strategy):
    here = quantize_named(UP, awkward_matrix(), Fp8Format(strategy))
    there = quantize_named(UP, awkward_matrix().cuda(), Fp8Format(strategy))
    for (_, expected), (_, made) in zip(here, there, strict=True):
        assert made.is_cuda
        assert torch.equal(made.cpu().reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
