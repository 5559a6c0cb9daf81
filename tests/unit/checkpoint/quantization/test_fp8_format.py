"""FP8 weights as engines are given them: names, shapes, scales that matrices share, and what config.json declares."""

import itertools

import numpy as np
import pytest
import torch
from tests.support.quantised import quantised

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.quantization.fp8 import Fp8Format, dequantize, quantize_named

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
    served = quantised(tensors, Fp8Format("tensor"))
    assert list(served) == ["lm_head.weight", GATE, f"{GATE}_scale", UP, f"{UP}_scale"]
    assert served[f"{GATE}_scale"] == served[f"{UP}_scale"] == np.float32(3) / np.float32(448)
    alone = quantised({GATE: tensors[GATE]}, Fp8Format("tensor"))
    assert alone[f"{GATE}_scale"] == np.float32(1) / np.float32(448)


@pytest.mark.parametrize(
    "served", [Fp8Format("block"), Fp8Format("block", "power_of_two"), Fp8Format("channel"), Fp8Format("tensor")]
)
@pytest.mark.parametrize(("rows", "columns"), [((0, 128, 300), (0, 257)), ((0, 7, 200, 300), (0, 100, 130, 257))])
def test_parts_of_a_matrix_are_served_as_the_whole_is(served, rows, columns):
    """Cut along blocks, and across them; scales come from magnitudes that the parts have found."""
    spread = torch.logspace(-3, 3, 300)[:, None]
    weight = (torch.randn(300, 257, generator=torch.Generator().manual_seed(1)) * spread).bfloat16()
    suffix = "_scale_inv" if served.strategy == "block" else "_scale"
    found = torch.zeros(served.served_specs(UP, TensorSpec((300, 257), "BF16"))[UP + suffix].shape)
    cuts = [(slice(*r), slice(*c)) for r in itertools.pairwise(rows) for c in itertools.pairwise(columns)]

    def scales(cut):
        if served.strategy == "block":
            return tuple(slice(axis.start // 128, -(-axis.stop // 128)) for axis in cut)
        return cut[0] if served.strategy == "channel" else ()

    for cut in cuts:
        here = served.magnitudes(weight[cut], tuple(axis.start for axis in cut))
        found[scales(cut)] = torch.maximum(found[scales(cut)], here)
    whole = dequantize(*served.quantize(UP, weight).values())
    for cut in cuts:
        corner = tuple(axis.start for axis in cut)
        assert torch.equal(served.served_values(weight[cut], corner, found[scales(cut)]), whole[cut])
    alone = served.served_values(weight[:128])
    assert torch.equal(alone, whole[:128]) == (served.strategy != "tensor"), "its scales may be its own"


@pytest.mark.parametrize("served", [Fp8Format("block"), Fp8Format("block", "power_of_two"), Fp8Format("channel")])
@pytest.mark.parametrize("shape", [(3, 5), (128, 64), (130, 257), (256, 128)])
@pytest.mark.parametrize("corner", [(0, 0), (128, 5)])
def test_matrices_of_a_stack_are_quantised_as_each_alone(served, shape, corner):
    spread = torch.logspace(-3, 3, 4)[:, None, None]
    stack = (torch.randn(4, *shape, generator=torch.Generator().manual_seed(2)) * spread).bfloat16()
    stack[1, 0, 0] = float("nan")
    codes, scales = served.quantize_part(stack, corner)
    alone = [served.quantize_part(matrix, corner) for matrix in stack]
    assert torch.equal(codes.view(torch.uint8), torch.stack([one for one, _ in alone]).view(torch.uint8))
    for found, (_, expected) in zip(scales, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    values = served.served_values(stack, corner)
    expected = torch.stack([served.served_values(matrix, corner) for matrix in stack])
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("scale", "value"), [("fp32", 3 / 448), ("power_of_two", 2**-7)])
def test_scales_of_blocks_are_those_asked_for(scale, value):
    made = Fp8Format("block", scale).quantize(UP, torch.full((4, 4), 3.0))
    assert made[f"{UP}_scale_inv"].tolist() == [[np.float32(value)]]


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


def test_nothing_else_lies_in_the_folder():
    assert Fp8Format().other_files(SPECS) == {}


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_rows_and_tensors_are_declared_as_compressed_tensors_reads_them(strategy):
    from compressed_tensors.quantization import QuantizationConfig

    declared = Fp8Format(strategy).quantization_config(SPECS)
    read = QuantizationConfig.model_validate(declared)
    weights = read.config_groups["group_0"].weights
    assert (weights.num_bits, weights.type, weights.strategy, weights.dynamic) == (8, "float", strategy, False)
    activations = read.config_groups["group_0"].input_activations
    assert (activations.num_bits, activations.type, activations.strategy) == (8, "float", "token")
    assert (weights.symmetric, activations.symmetric, activations.dynamic) == (True, True, True)
    assert (read.format, read.ignore, read.quantization_status) == ("float-quantized", ["lm_head"], "compressed")
    assert "scale_fmt" not in declared
