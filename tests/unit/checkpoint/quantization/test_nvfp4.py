import json
import math
from fnmatch import fnmatch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY_QWEN3_5_MOE

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.quantization import fp8, nvfp4
from posttrain.checkpoint.quantization.calibration import Calibration
from posttrain.checkpoint.quantization.fp8 import largest_magnitude
from posttrain.checkpoint.quantization.nvfp4 import Nvfp4Format, decode, encode, excluded_modules, global_scale
from posttrain.checkpoint.quantization.quantized_names import Selection

# ---- an independent reference: E2M1 by its definition, group by group ----


def e2m1_value(code):
    sign = -1.0 if code & 8 else 1.0
    exponent, fraction = (code >> 1) & 3, code & 1
    return sign * (fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))


def nearest_code(value):
    magnitudes = [e2m1_value(code) for code in range(8)]
    distances = [abs(m - min(abs(value), 6.0)) for m in magnitudes]
    best = [code for code in range(8) if distances[code] == min(distances)]
    code = next((c for c in best if c % 2 == 0), best[0])
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


def reference(weight):
    """Return packed codes, group scales as bytes, and the global scale, in NumPy FP32."""
    weight = weight.float().numpy()
    amax = np.abs(weight).max()
    scale_2 = max(amax / np.float32(2688), np.float32(2.0**-126)) if amax else np.float32(1)
    rows, columns = weight.shape
    scales = np.zeros((rows, columns // 16), np.uint8)
    packed = np.zeros((rows, columns // 2), np.uint8)
    for i in range(rows):
        for j in range(columns // 16):
            group = weight[i, 16 * j : 16 * j + 16]
            exact = np.abs(group).max() / (np.float32(6) * np.float32(scale_2))
            exact = np.clip(exact, np.float32(2.0**-9), np.float32(448)) if group.any() else np.float32(1)
            stored = torch.tensor(exact).to(torch.float8_e4m3fn)
            scales[i, j] = stored.view(torch.uint8).item()
            step = np.float32(stored.float().item()) * np.float32(scale_2)
            codes = [nearest_code(float(w / step)) for w in group]
            packed[i, 8 * j : 8 * j + 8] = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return packed, scales, np.float32(scale_2)


def quantize(weight):
    scale_2 = global_scale(largest_magnitude(weight))
    return *nvfp4.quantize(weight, scale_2), scale_2


# ---- hand-computed ----


def test_numbers_by_hand():
    row = torch.tensor([[6.0, -0.5, 0.25, 0.75, 2.5, 3.5, 5.0, -5.1, 0.0, -0.0, 1, 1.5, 2, 3, 4, -6]])
    packed, scale, scale_2 = quantize(row)
    assert scale_2.item() == np.float32(6.0) / np.float32(2688)
    assert scale.float().tolist() == [[448.0]]
    # 6 -0.5 | 0.25->0 0.75->1 | 2.5->2 3.5->4 | 5->4 -5.1->-6 | 0 -0 | 1 1.5 | 2 3 | 4 -6
    assert packed.tolist() == [[0x97, 0x20, 0x64, 0xF6, 0x80, 0x32, 0x54, 0xF6]]


def test_all_sixteen_codes_come_back():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scale, scale_2 = torch.tensor([[448.0], [7.0]]).to(torch.float8_e4m3fn), torch.tensor(0.25)
    values = decode(packed, scale, scale_2)
    assert values[0].tolist() == [e2m1_value(code) * 112 for code in range(16)]
    assert values[1].tolist() == [e2m1_value(code) * 1.75 for code in range(16)]
    assert torch.equal(encode(values, scale, scale_2), packed)


# ---- against the reference, and bounds ----


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31), st.floats(-40, 36))
def test_equals_a_slow_reference_bit_by_bit(rows, groups, seed, magnitude):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 16 * groups, generator=generator, dtype=torch.float64) * 10.0**magnitude
    weight = (weight * torch.randint(0, 2, (rows, 16 * groups), generator=generator)).float()
    packed, scale, scale_2 = quantize(weight)
    expected = reference(weight)
    np.testing.assert_array_equal(packed.numpy(), expected[0])
    np.testing.assert_array_equal(scale.view(torch.uint8).numpy(), expected[1])
    assert scale_2.item() == expected[2]


def test_zeros_stay_zeros():
    packed, scale, scale_2 = quantize(torch.zeros(2, 32))
    assert scale_2.item() == 1.0
    assert torch.equal(decode(packed, scale, scale_2), torch.zeros(2, 32))


def test_the_error_is_that_of_four_bits():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    packed, scale, scale_2 = quantize(weight)
    error = decode(packed, scale, scale_2) - weight
    assert 0.05 < (error.norm() / weight.norm()).item() < 0.12
    largest = weight.unflatten(1, (-1, 16)).abs().amax(2, keepdim=True)
    assert (error.unflatten(1, (-1, 16)).abs() <= largest / 6 * 1.07).all()
    assert packed.shape == (64, 128)
    assert scale.shape == (64, 16)


def test_a_small_group_beside_a_large_one_keeps_the_smallest_scale():
    weight = torch.full((1, 32), 1.0)
    weight[0, :16] = 1e-9
    packed, scale, scale_2 = quantize(weight)
    assert scale.float().tolist() == [[2.0**-9, 448.0]]
    assert decode(packed, scale, scale_2)[0, :16].tolist() == [0.0] * 16


def test_ten_thousand_tensors_hold_no_nan():
    """Random shapes and magnitudes, with zeros, subnormal numbers and the largest number mixed in."""
    numbers = np.random.default_rng(11)
    special = np.array([0.0, -0.0, 1e-45, -1e-40, 3.4028235e38, -3.4028235e38, 1.1754944e-38], np.float32)
    for _ in range(10_000):
        shape = numbers.integers(1, 4), 16 * numbers.integers(1, 4)
        weight = (numbers.standard_normal(shape) * 10.0 ** numbers.uniform(-44, 37)).astype(np.float32)
        chosen = numbers.random(shape) < 0.2
        weight[chosen] = numbers.choice(special, size=chosen.sum())
        packed, scale, scale_2 = quantize(torch.from_numpy(weight))
        assert torch.isfinite(scale_2)
        assert torch.isfinite(scale.float()).all()
        assert torch.isfinite(decode(packed, scale, scale_2)).all()


def test_what_is_not_finite_is_refused_with_its_name():
    with rejected("values-not-finite", "b: "):
        global_scale(torch.tensor(torch.nan), "b")


def test_the_bits_do_not_depend_on_how_many_rows_are_worked_on_at_a_time(monkeypatch):
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    whole = quantize(weight)
    monkeypatch.setitem(fp8.SLAB_ELEMENTS, "cpu", 1)
    for expected, made in zip(whole, quantize(weight), strict=True):
        assert torch.equal(expected.reshape(-1).view(torch.uint8), made.reshape(-1).view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_same_bytes():
    weight = torch.randn(33, 256, generator=torch.Generator().manual_seed(4)) * 1e-3
    for expected, made in zip(quantize(weight), quantize(weight.cuda()), strict=True):
        assert torch.equal(made.cpu().reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


# ---- the format ----


def expert(number, projection, layer=1):
    return f"model.layers.{layer}.mlp.experts.{number}.{projection}_proj.weight"


PROJECTIONS = ("gate", "up", "down")
EXPERT = expert(2, "up")
NAMES = tuple(expert(number, projection) for number in range(3) for projection in PROJECTIONS)
SELECTION = Selection(("experts",), num_layers=3, mtp=False)


def test_what_is_served_is_what_was_announced():
    served = Nvfp4Format(SELECTION)
    weight = torch.randn(8, 32).bfloat16()
    made = served.quantize(EXPERT, weight, largest_magnitude(weight))
    specs = served.served_specs(EXPERT, TensorSpec((8, 32), "BF16"))
    base = EXPERT.removesuffix(".weight")
    assert list(made) == list(specs) == [EXPERT, f"{EXPERT}_scale", f"{EXPERT}_scale_2", f"{base}.input_scale"]
    assert [tuple(t.shape) for t in made.values()] == [spec.shape for spec in specs.values()]
    assert made[f"{base}.input_scale"].item() == 1.0


def test_rows_that_do_not_divide_into_groups_are_refused():
    with rejected("rows-not-in-groups", "rows of 40 weights"):
        Nvfp4Format(SELECTION).served_specs(EXPERT, TensorSpec((8, 40), "BF16"))


def test_everything_but_experts_is_excluded_by_pattern():
    names = [*NAMES, *(expert(0, "up", layer) for layer in (2, 3)), "model.layers.0.mlp.up_proj.weight"]
    tail = ["model.layers.0.mlp*", "model.layers.3*"]
    always = ["lm_head", "model.embed_tokens"]
    always += ["model.layers.*.self_attn*", "model.layers.*.mlp.gate", "model.layers.*.mlp.shared_experts*"]
    assert excluded_modules(names, SELECTION) == always + tail
    kept = Selection(("experts",), num_layers=3, keep_last_layers=1, mtp=False)
    assert excluded_modules(names, kept) == [*always, tail[0], "model.layers.2.mlp.experts*", tail[1]]


def test_of_qwen3_5_nothing_but_the_decoders_experts_is_quantized():
    """Each excluded module is one that a pattern matches, and no pattern matches an expert."""
    specs, selection = expected_tensors(TINY_QWEN3_5_MOE), Selection(("experts",), num_layers=4, mtp=False)
    patterns = excluded_modules(specs, selection)
    matched = {name for name in specs if any(fnmatch(name.removesuffix(".weight"), pattern) for pattern in patterns)}
    matrices = {name for name, spec in specs.items() if len(spec.shape) == 2}
    quantized = {name for name, spec in specs.items() if selection.includes(name, spec.shape)}
    assert len(quantized) == 4 * 4 * 3
    assert matrices - matched == quantized


# ---- calibration ----


def amax_of(which, number, projection):
    return expert(number, projection).removesuffix(".weight") + f".{which}_quantizer._amax"


def test_passes_are_merged_by_maximum_whatever_their_order_and_form(tmp_path):
    files = [tmp_path / "coding.json", tmp_path / "broad.safetensors"]
    files[0].write_text(json.dumps({amax_of("input", 0, "up"): 26.88, amax_of("input", 1, "up"): 1.0}))
    save_file(
        {amax_of("input", 0, "up"): torch.tensor([13.44]), amax_of("input", 1, "up"): torch.tensor(2.0)}, files[1]
    )
    for order in (files, files[::-1]):
        merged = Calibration(order)
        assert merged.input_amax([expert(0, "up")]).item() == np.float32(26.88)
        assert merged.input_amax([expert(1, "up")]).item() == 2.0
        assert merged.weight_amax([expert(1, "up")]) is None


def test_gate_and_up_share_their_scales_and_an_expert_without_samples_takes_its_layers(tmp_path):
    seen = {amax_of("input", 0, p): 26.88 for p in ("gate", "up")} | {amax_of("input", 1, "gate"): 53.76}
    seen |= {amax_of("input", 2, "up"): 0.0, amax_of("input", 0, "down"): 2.688}
    (tmp_path / "a.json").write_text(json.dumps(seen))
    served = Nvfp4Format(SELECTION, Calibration([tmp_path / "a.json"]), NAMES)
    weight = torch.ones(4, 16)

    def input_scale(number, projection):
        name = expert(number, projection)
        return list(served.quantize(name, weight, torch.tensor(1.0)).values())[-1].item()

    assert input_scale(0, "up") == input_scale(0, "gate") == pytest.approx(0.01)
    assert input_scale(1, "up") == input_scale(1, "gate") == pytest.approx(0.02)
    # Expert 2 was never routed to.
    assert input_scale(2, "down") == pytest.approx(0.001)
    assert input_scale(2, "up") == pytest.approx(0.01)
    assert input_scale(2, "gate") == pytest.approx(0.02)


def test_the_amax_of_weights_may_be_given_and_cuts_off_what_is_larger(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({amax_of("weight", 0, p): 1.0 for p in PROJECTIONS}))
    calibration = Calibration([tmp_path / "a.json"])
    assert calibration.weight_amax([expert(0, "gate"), expert(1, "gate")]) is None
    weight = torch.full((1, 16), 0.5)
    weight[0, 3] = 2.0
    scale_2 = global_scale(torch.tensor(2.0), "w", calibration.weight_amax([expert(0, "up")]))
    assert scale_2.item() == np.float32(1) / np.float32(2688)
    assert decode(*nvfp4.quantize(weight, scale_2), scale_2)[0, 3].item() == pytest.approx(1.0)


def test_a_layer_without_any_sample_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({amax_of("input", 0, "up"): 1.0}))
    served = Nvfp4Format(SELECTION, Calibration([tmp_path / "a.json"]), NAMES)
    with rejected("expert-not-calibrated"):
        served.quantize(expert(0, "down"), torch.ones(4, 16), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("[1]", "a.json"),
        ("{", "a.json"),
        ('{"a.weight": 1}', "a.weight"),
        ('{"a.input_quantizer._amax": -1}', "-1"),
        ('{"a.input_quantizer._amax": NaN}', "nan"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, content, found):
    (tmp_path / "a.json").write_text(content)
    with rejected("magnitudes-invalid", found):
        Calibration([tmp_path / "a.json"])


def test_passes_that_disagree_about_a_shape_are_refused(tmp_path):
    for file, value in (("a.json", "1"), ("b.json", "[1, 2]")):
        (tmp_path / file).write_text(f'{{"m.input_quantizer._amax": {value}}}')
    with rejected("magnitudes-invalid", "[2], another pass has []"):
        Calibration([tmp_path / "a.json", tmp_path / "b.json"])
    with rejected("magnitudes-invalid"):
        Calibration([tmp_path / "b.json"]).input_amax(["m.weight"])
