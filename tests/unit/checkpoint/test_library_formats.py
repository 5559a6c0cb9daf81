import pytest
import torch

from posttrain.checkpoint.library_formats import LibraryFormat, decompress
from posttrain.checkpoint.quantized_names import Selection
from posttrain.checkpoint.safetensors_io import TensorSpec
from posttrain.checkpoint.shard_writer import TORCH_DTYPES
from posttrain.errors import CheckpointError

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


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_is_refused_with_its_name(name):
    weight = weights()
    weight[5, 7] = torch.inf
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight: holds NaN or infinity"):
        quantize(name, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_do_not_divide_into_groups_are_refused(name):
    with pytest.raises(CheckpointError, match=f"rows of 40 weights, {name}"):
        LibraryFormat(name, Selection()).served_specs(NAME, TensorSpec((8, 40), "BF16"))
