import dataclasses

import numpy as np
import pytest
import torch
from tests.support.megatron_single import CONFIG_DIR
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import FAMILIES

from posttrain.checkpoint.formats.library_formats import LibraryFormat, decompress
from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.checkpoint.formats.shard_writer import TORCH_DTYPES
from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.quantization.quantized_names import CLASSES, Selection
from posttrain.config.formats import Serving
from posttrain.config.rules import _serving_rows
from posttrain.errors import CheckpointError
from posttrain.plan.resolve import resolve

NAME = "model.layers.1.mlp.experts.2.up_proj.weight"
MODULE = "model.layers.1.mlp.experts.2.up_proj."
FORMATS = ("mxfp8", "int4")


def weights(columns=256):
    weight = torch.randn(6, columns, generator=torch.Generator().manual_seed(5)).bfloat16()
    weight[0, :128] = 0
    return weight


def quantize(name, weight):
    made = LibraryFormat(name, Selection()).quantize(NAME, weight)
    return {key.removeprefix(MODULE): tensor for key, tensor in made.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_served_is_what_was_announced(name):
    made = quantize(name, weights())
    specs = LibraryFormat(name, Selection()).served_specs(NAME, TensorSpec((6, 256), "BF16"))
    found = {MODULE + key: (tuple(t.shape), t.dtype) for key, t in made.items()}
    assert found == {key: (spec.shape, TORCH_DTYPES[spec.dtype]) for key, spec in specs.items()}


@pytest.mark.parametrize(("name", "largest_error"), [("mxfp8", 0.03), ("int4", 0.13)])
def test_the_weights_come_back_with_the_formats_error(name, largest_error):
    weight = weights()
    config = LibraryFormat(name, Selection()).quantization_config({})
    values = decompress(config, quantize(name, weight))
    assert (values[0, :128] == 0).all()
    assert ((values - weight.float()).norm() / weight.float().norm()).item() < largest_error


def test_mxfp8_by_its_definition():
    """Scales are powers of two under which the largest of 32 neighbours is at most 448, and above a quarter of it."""
    weight = weights().float()
    made = quantize("mxfp8", weight)
    scale = torch.exp2(made["weight_scale"].double() - 127)
    scaled = weight.double().unflatten(1, (-1, 32)) / scale[:, :, None]
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    assert torch.equal(made["weight"].view(torch.uint8), codes.view(torch.uint8))
    largest = scaled.abs().amax(2)[made["weight_scale"] > 0]
    assert ((largest > 112) & (largest <= 464)).all()


def test_int4_by_its_definition():
    """Eight codes of four bits, offset by 8, lie in 32; the first in the lowest bits."""
    weight = weights().float()
    made = quantize("int4", weight)
    packed = made["weight_packed"].numpy().view("uint32").astype("int64")
    codes = torch.stack([torch.from_numpy((packed >> (4 * i)) & 15) - 8 for i in range(8)], dim=2).flatten(1)
    scale = made["weight_scale"].float()[:, :, None]
    expected = torch.round(weight.unflatten(1, (-1, 128)) / scale).clamp(-8, 7).flatten(1)
    assert torch.equal(codes.float(), expected)


LIMIT = 1.75 * 2.0**127
BELOW_LIMIT = 2.9774705e38  # the number before it in FP32


@pytest.mark.parametrize("sign", [1, -1])
def test_what_mxfp8_has_no_scale_for_is_refused_and_not_made_zero(sign):
    weight = torch.ones(3, 64)
    weight[1, 40] = sign * BELOW_LIMIT
    assert float(weight[1, 40].abs()) == np.nextafter(np.float32(LIMIT), np.float32(0)) < LIMIT
    made = quantize("mxfp8", weight)
    values = decompress(LibraryFormat("mxfp8", Selection()).quantization_config({}), made)
    assert values[1, 40] == sign * LIMIT
    assert torch.equal(values[1, :32], weight[1, :32]), "another group"
    weight[1, 40] = sign * LIMIT
    with rejected("value-too-large", "experts.2.up_proj.weight", "2.97747e+38"):
        quantize("mxfp8", weight)
    config = LibraryFormat("int4", Selection()).quantization_config({})
    assert torch.isfinite(decompress(config, quantize("int4", weight.repeat(1, 2)))).all()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_is_refused_with_its_name(name):
    weight = weights()
    weight[5, 7] = torch.inf
    with rejected("values-not-finite", "experts.2.up_proj.weight"):
        quantize(name, weight)


WIDTHS = ("hidden_size", "moe_intermediate_size", "intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim")


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v3", "qwen3_moe", "qwen3", "glm4_moe"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_configuration_refuses_what_the_job_would(name, family):
    """With one width changed at a time, the rule and the format itself agree on every family."""
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    config = dataclasses.replace(config, serving=Serving(name))
    good = dataclasses.replace(
        FAMILIES[family],
        **{width: 128 for width in WIDTHS if getattr(FAMILIES[family], width)},
        num_attention_heads=8,
    )
    for arch in (good, *(dataclasses.replace(good, **{width: 40}) for width in WIDTHS if getattr(good, width))):
        model = dataclasses.replace(config.model, architecture=arch)
        problems = _serving_rows(dataclasses.replace(config, model=model))
        assert bool(list(problems)) == is_refused_by_the_job(name, arch), arch


def is_refused_by_the_job(name, arch):
    served = LibraryFormat(name, Selection(("experts",) if name == "int4" else CLASSES, arch.num_hidden_layers))
    try:
        for hf_name, spec in expected_tensors(arch).items():
            if served.selection.includes(hf_name, spec.shape):
                served.served_specs(hf_name, spec)
    except CheckpointError:
        return True
    return False


@pytest.mark.parametrize("kept", ["keep_modules=[down_proj]", "keep_first_layers=1", "keep_last_layers=1"])
def test_where_modules_are_kept_the_job_decides(kept):
    wrong = "serving.format=mxfp8"
    with rejected("rows-not-in-blocks", "q_lora_rank", "rows of 48", key="serving.format"):
        resolve({"model": "tiny", "site": "local", "set": wrong}, CONFIG_DIR)
    resolve({"model": "tiny", "site": "local", "set": f"{wrong} quantize.{kept}"}, CONFIG_DIR)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_do_not_divide_into_groups_are_refused(name):
    with rejected("rows-not-in-groups", "rows of 40 weights", name):
        LibraryFormat(name, Selection()).served_specs(NAME, TensorSpec((8, 40), "BF16"))
