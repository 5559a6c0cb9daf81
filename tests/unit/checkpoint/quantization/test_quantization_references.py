"""Codes and scales against independent implementations: compressed-tensors (FP8) and NVIDIA Model Optimizer (NVFP4).

Where ours differ, and why:

- Zeros. Both give a block, row or tensor of zeros the smallest positive scale or none; ours is 1. Codes are equal.
- -0. Model Optimizer writes +0 for it; we keep the sign.
- A matrix of zeros. Model Optimizer's `weight_scale_2` is 0 then, which its own codes cannot be made with; ours is 1.
"""

from __future__ import annotations

import pytest
import torch

from posttrain.checkpoint.quantization import fp8, nvfp4

STRATEGIES = ("block", "channel", "tensor")


def weights(dtype, rows=256, columns=384, seed=1):
    """Random numbers over twelve orders of magnitude, none of them zero."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, columns, generator=generator) * 12 - 12
    return (torch.randn(rows, columns, generator=generator) * 10**spread).to(dtype)


def theirs_fp8(weight, strategy):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    structure = {"block_structure": [128, 128]} if strategy == "block" else {}
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False, **structure)
    if strategy == "block":
        tiles = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    elif strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.amin(), weight.amax()
    scale, zero_point = calculate_qparams(low, high, args)
    return quantize(weight, scale, zero_point, args, dtype=torch.float8_e4m3fn), scale


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp8_equals_compressed_tensors(strategy):
    weight = weights(torch.float32)
    ours = getattr(fp8, f"quantize_{strategy}")(weight)
    codes, scale = theirs_fp8(weight, strategy)
    assert torch.equal(ours[1].reshape(scale.shape), scale)
    assert torch.equal(ours[0].view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dequantised_fp8_equals_compressed_tensors(strategy):
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codes, scale = getattr(fp8, f"quantize_{strategy}")(weights(torch.bfloat16))
    assert torch.equal(fp8.dequantize(codes, scale), dequantize(codes, scale))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zeros_have_other_scales_and_the_same_codes(strategy):
    weight = torch.zeros(128, 128)
    ours = getattr(fp8, f"quantize_{strategy}")(weight)
    codes, scale = theirs_fp8(weight, strategy)
    assert torch.equal(ours[0].view(torch.uint8), codes.view(torch.uint8))
    assert ((ours[1] == 1).all(), (scale < 1).all()) == (True, True)


def theirs_nvfp4(weight):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    quantized, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
    return quantized._quantized_data, scale, scale_2


def ours_nvfp4(weight):
    scale_2 = nvfp4.global_scale(fp8.largest_magnitude(weight))
    return *nvfp4.quantize(weight, scale_2), scale_2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 1e3])
def test_nvfp4_equals_model_optimizer(dtype, magnitude):
    weight = (weights(torch.float32) * magnitude).to(dtype)
    weight[7, 16:64] = 0
    for ours, theirs in zip(ours_nvfp4(weight), theirs_nvfp4(weight), strict=True):
        assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def test_nvfp4_codes_at_every_tie_equal_model_optimizers():
    values = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6])
    (ours, *_), (theirs, *_) = ours_nvfp4(values[None]), theirs_nvfp4(values[None])
    assert torch.equal(ours, theirs)


def test_dequantised_nvfp4_equals_model_optimizer():
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    weight = weights(torch.float32)
    packed, scale, scale_2 = ours_nvfp4(weight)
    theirs = NVFP4QTensor(weight.shape, torch.float32, packed).dequantize(
        torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
    )
    assert torch.equal(nvfp4.decode(packed, scale, scale_2), theirs)


def test_nvfp4_keeps_the_sign_of_zero():
    weight = torch.ones(1, 16)
    weight[0, 0] = -0.0
    (ours, *_), (theirs, *_) = ours_nvfp4(weight), theirs_nvfp4(weight)
    assert (ours[0, 0].item(), theirs[0, 0].item()) == (0x78, 0x70)
    assert torch.equal(ours[0, 1:], theirs[0, 1:])


def test_nvfp4_of_zeros_has_a_scale():
    packed, scale, scale_2 = ours_nvfp4(torch.zeros(1, 16))
    assert (packed.tolist(), scale.float().tolist(), scale_2.item()) == ([[0] * 8], [[1.0]], 1.0)
    _, their_scale, their_scale_2 = theirs_nvfp4(torch.zeros(1, 16))
    assert their_scale.float().isnan().all()
    assert their_scale_2.item() == 0


def model_optimizers_expert(weights_of, inputs):
    """Calibrate a gated MLP with Model Optimizer and export it; returns its maxima and what it makes of each matrix."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.quant_utils import get_weight_scaling_factor, get_weight_scaling_factor_2
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    class Expert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, weight in weights_of.items():
                linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight.data = weight.clone()
                setattr(self, name, linear)

        def forward(self, x):
            return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    expert = mtq.quantize(Expert(), mtq.NVFP4_DEFAULT_CFG, lambda model: [model(x) for x in inputs])
    made = {}
    for name in weights_of:
        module = getattr(expert, name)
        scale_2 = get_weight_scaling_factor_2(module)
        scale = get_weight_scaling_factor(module)
        codes = NVFP4QTensor.quantize(module.weight.detach(), 16, scale, scale_2)[0]._quantized_data
        made[name] = codes, scale, scale_2, NVFP4QTensor.get_activation_scaling_factor(module.input_quantizer)
    amax = {name: value for name, value in expert.state_dict().items() if name.endswith("_quantizer._amax")}
    return amax, made


def test_an_expert_that_was_calibrated_equals_model_optimizers_export(tmp_path):
    """Codes, scales and `input_scale`, of the same weights and maxima: gate and up share what engines join."""
    from safetensors.torch import save_file

    from posttrain.checkpoint.formats.safetensors_io import TensorSpec
    from posttrain.checkpoint.quantization.calibration import Calibration
    from posttrain.checkpoint.quantization.quantized_names import Selection

    generator = torch.Generator().manual_seed(5)
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    weights_of = {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in shapes.items()}
    # Of joined matrices Model Optimizer exports the larger amax: here both have the same.
    largest = max(float(weights_of[name].abs().max()) for name in ("gate_proj", "up_proj"))
    for name in ("gate_proj", "up_proj"):
        weights_of[name][0, 0] = largest
    inputs = [3 * torch.randn(7, 64, generator=generator) for _ in range(3)]
    amax, theirs = model_optimizers_expert(weights_of, inputs)
    module = "model.layers.1.mlp.experts.0."
    save_file({module + name: value.float() for name, value in amax.items()}, tmp_path / "pass.safetensors")
    names = {f"{module}{name}.weight": TensorSpec(shape, "BF16") for name, shape in shapes.items()}
    calibration = Calibration([tmp_path / "pass.safetensors"])
    calibration.check(names)
    served = nvfp4.Nvfp4Format(Selection(("experts",), num_layers=2, mtp=False), calibration, tuple(names))
    for name, weight in weights_of.items():
        hf_name = f"{module}{name}.weight"
        given = fp8.largest_magnitude(weight)
        made = served.quantize(hf_name, weight, given)
        for ours, their in zip(made.values(), theirs[name], strict=True):
            assert torch.equal(ours.reshape(-1).view(torch.uint8), their.reshape(-1).view(torch.uint8)), name
        specs = served.served_specs(hf_name, names[hf_name])
        assert [tuple(tensor.shape) for tensor in made.values()] == [spec.shape for spec in specs.values()]
        assert made[f"{module}{name}.input_scale"] not in (0, 1)
