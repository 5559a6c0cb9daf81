import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from posttrain.checkpoint.nvfp4_folder import finalize_folder, write_shards
from tests.tiny_checkpoint import TINY, make_random_checkpoint

from posttrain.artifacts import partial_of
from posttrain.checkpoint.nvfp4 import (
    Layers,
    decode,
    encode,
    excluded_modules,
    global_scale,
    group_scale,
    is_quantized,
    partners,
    served_specs,
)
from posttrain.checkpoint.safetensors_io import CheckpointReader, TensorSpec
from posttrain.errors import CheckpointError

LAYERS = Layers(num_dense=1, num_decoder=3, num_mtp=1)
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


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
            exact = min(np.abs(group).max() / np.float32(6) / np.float32(scale_2), np.float32(448))
            stored = torch.tensor(exact).to(torch.float8_e4m3fn)
            scales[i, j] = stored.view(torch.uint8).item()
            step = np.float32(stored.float().item()) * np.float32(scale_2)
            codes = [nearest_code(float(w / step)) if step > 0 else 0 for w in group]
            packed[i, 8 * j : 8 * j + 8] = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return packed, scales, np.float32(scale_2)


def quantize(weight):
    scale_2 = global_scale({"w": weight})
    scale = group_scale(weight, scale_2)
    return encode(weight, scale, scale_2), scale, scale_2


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


def test_what_is_not_finite_is_refused_with_its_name():
    with pytest.raises(CheckpointError, match="b: holds NaN"):
        global_scale({"a": torch.ones(1, 16), "b": torch.full((1, 16), torch.nan)})


# ---- what is quantised ----


def test_routed_experts_of_decoder_layers_only():
    assert is_quantized(EXPERT, LAYERS)
    for name in (
        EXPERT.replace("layers.1", "layers.3"),
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "lm_head.weight",
    ):
        assert not is_quantized(name, LAYERS)


def test_gate_and_up_share_their_global_scale():
    pair = ("model.layers.1.mlp.experts.2.gate_proj.weight", EXPERT)
    assert partners(pair[0]) == partners(pair[1]) == pair
    assert partners(EXPERT.replace("up", "down")) == (EXPERT.replace("up", "down"),)


def test_rows_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(CheckpointError, match="rows of 40 weights"):
        served_specs(EXPERT, TensorSpec((8, 40), "BF16"), LAYERS)


def test_layers_are_read_from_the_config():
    config = {"first_k_dense_replace": 3, "num_hidden_layers": 78, "num_nextn_predict_layers": 1}
    assert Layers.of_config(config) == Layers(3, 78, 1)
    with pytest.raises(CheckpointError, match="first_k_dense_replace"):
        Layers.of_config({"num_hidden_layers": 4})


# ---- the folder ----


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_random_checkpoint(folder)
    return folder


def test_the_folder_round_trips(tmp_path, source):
    folder = tmp_path / "nvfp4"
    shards = write_shards(source, "s1", folder, num_threads=2)
    others = finalize_folder(source, partial_of(folder))
    origin, stored = CheckpointReader(source), CheckpointReader(partial_of(folder))
    assert {record.path for record in (*shards, *others)} == {p.name for p in partial_of(folder).iterdir()}
    index = json.loads((partial_of(folder) / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == stored.total_bytes
    num_quantized = 0
    for name in origin:
        if not is_quantized(name, LAYERS):
            assert torch.equal(stored.tensor(name), origin.tensor(name))
            continue
        num_quantized += 1
        parts = [stored.tensor(f"{name}{suffix}") for suffix in ("", "_scale", "_scale_2")]
        shared = global_scale({partner: origin.tensor(partner) for partner in partners(name)})
        assert torch.equal(parts[2], shared)
        weight = origin.tensor(name).float()
        assert ((decode(*parts) - weight).norm() / weight.norm()).item() < 0.12
    assert num_quantized == 2 * TINY.n_routed_experts * 3


def test_the_config_says_what_is_quantised(tmp_path, source):
    folder = tmp_path / "nvfp4"
    write_shards(source, "s1", folder)
    finalize_folder(source, partial_of(folder))
    config = json.loads((partial_of(folder) / "config.json").read_text())["quantization_config"]
    nested = json.loads((partial_of(folder) / "hf_quant_config.json").read_text())["quantization"]
    assert config == {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": excluded_modules(LAYERS),
    }
    assert nested == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": excluded_modules(LAYERS),
    }
    assert excluded_modules(LAYERS)[-2:] == ["model.layers.0.mlp*", "model.layers.3*"]
