import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.e4m3 import MAGNITUDES, nearest_code, reference_block, reference_codes
from tests.support.rejections import rejected

from posttrain.checkpoint.quantization import fp8
from posttrain.checkpoint.quantization.fp8 import (
    SMALLEST_SCALE,
    Fp8Format,
    dequantize,
    dequantize_block,
    quantize_block,
    quantize_channel,
    quantize_named,
    quantize_tensor,
)


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
    with rejected("values-not-finite", "model.layers.0.mlp.up_proj.weight"):
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
    with rejected("values-not-finite", "w: "):
        quantize(weight, "w")


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
def test_a_gpu_makes_the_same_bytes(strategy):
    here = quantize_named(UP, awkward_matrix(), Fp8Format(strategy))
    there = quantize_named(UP, awkward_matrix().cuda(), Fp8Format(strategy))
    for (_, expected), (_, made) in zip(here, there, strict=True):
        assert made.is_cuda
        assert torch.equal(made.cpu().reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
