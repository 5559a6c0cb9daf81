import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.folders_in_parts import make_folder
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY, make_random_checkpoint

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.parts.converted_folder import RecodedFolder
from posttrain.checkpoint.quantization import fp8
from posttrain.checkpoint.quantization.dequantize import CastToBf16, QuantizedCheckpoint
from posttrain.checkpoint.quantization.quantization_report import verify_weights
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.errors import CheckpointError

# Wider than a block and not a whole number of blocks; experts in whole groups of every format.
ARCH = dataclasses.replace(TINY, hidden_size=256, moe_intermediate_size=128, intermediate_size=160)
DENSE, EXPERT = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"
FORMATS = {
    "block": {"format": "fp8", "strategy": "block", "scale": "fp32"},
    "power_of_two": {"format": "fp8", "strategy": "block", "scale": "power_of_two"},
    "channel": {"format": "fp8", "strategy": "channel", "scale": "fp32"},
    "tensor": {"format": "fp8", "strategy": "tensor", "scale": "fp32"},
    "nvfp4": {"format": "nvfp4"},
    "mxfp8": {"format": "mxfp8", "keep_modules": [r"_b_proj", "o_proj", "dense", r"layers\.0\.mlp", "indexer"]},
    "int4": {"format": "int4"},
}
# Relative errors of random numbers.
ERRORS = {"nvfp4": (0.07, 0.12), "int4": (0.08, 0.14)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_random_checkpoint(folder, ARCH)
    return folder


@pytest.fixture(scope="module")
def quantized(source, tmp_path_factory):
    """Folders by format."""
    root = tmp_path_factory.mktemp("quantized")
    return {name: recode(Quantization(source, settings), root / name) for name, settings in FORMATS.items()}


def recode(recoding, folder):
    make_folder(RecodedFolder(recoding, "s1"), folder)
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_cast_back_to_bf16(tmp_path, source, quantized, name):
    cast = recode(CastToBf16(quantized[name]), tmp_path / "bf16")
    origin, back, values = CheckpointReader(source), CheckpointReader(cast), QuantizedCheckpoint(quantized[name])
    assert back.names == origin.names
    assert {n: i.spec for n, i in back.infos.items()} == {n: i.spec for n, i in origin.infos.items()}
    changed = {n for n in origin if not torch.equal(back.tensor(n).float(), origin.tensor(n).float())}
    assert changed == {n for n in origin if values.is_quantized(n)}
    assert EXPERT in changed
    low, high = ERRORS.get(name, (0.015, 0.04))
    for changed_name in changed:
        weight = origin.tensor(changed_name).float()
        assert low < ((back.tensor(changed_name).float() - weight).norm() / weight.norm()).item() < high
    assert json.loads((cast / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert not (cast / "hf_quant_config.json").exists()
    Quantization(cast, FORMATS["block"])


@pytest.mark.parametrize("name", ["channel", "tensor", "mxfp8", "int4"])
def test_values_equal_what_compressed_tensors_makes_of_the_folder(quantized, name):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    reader, values = CheckpointReader(quantized[name]), QuantizedCheckpoint(quantized[name])
    declared = json.loads((quantized[name] / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(declared)
    module = EXPERT.removesuffix("weight")
    state = {key.removeprefix(module): reader.tensor(key) for key in reader if key.startswith(module)}
    compressor = BaseCompressor.get_value_from_registry(config.format)
    expected = compressor.decompress(state, config.config_groups["group_0"])["weight"]
    ours = values.rows(EXPERT, slice(0, 128))
    assert torch.equal(ours.to(expected.dtype), expected)


STRATEGIES = {
    "tensor": {},
    "channel": {},
    "group 32": {"group_size": 32},
    "group 128": {"group_size": 128},
    "block": {"block_structure": [128, 128]},
    "small block": {"block_structure": [64, 64]},
}
LAYOUTS = [("float-quantized", "float", 8), ("int-quantized", "int", 8), ("naive-quantized", "float", 8)]
LAYOUTS += [("naive-quantized", "int", 8), ("pack-quantized", "int", 4), ("pack-quantized", "int", 8)]


def of_the_library(folder, layout, strategy, is_symmetric, rows=512, columns=256):
    """Write a matrix that compressed-tensors has compressed, and return what it decompresses."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    format_name, kind, bits = layout
    given = {"strategy": strategy.split()[-1] if "block" in strategy else strategy.split()[0], **STRATEGIES[strategy]}
    args = QuantizationArgs(num_bits=bits, type=kind, symmetric=is_symmetric, **given)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format_name)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    side = STRATEGIES[strategy].get("block_structure", [rows if strategy == "tensor" else 1])[0]
    width = {"tensor": columns, "channel": columns}.get(strategy, STRATEGIES[strategy].get("group_size", side))
    cells = weight.unflatten(0, (-1, side)).unflatten(2, (-1, width))
    low, high = cells.amin(dim=(1, 3)), cells.amax(dim=(1, 3))
    low, high = (low.reshape(1), high.reshape(1)) if strategy == "tensor" else (low, high)
    scale, zero_point = calculate_qparams(low, high, args)
    compressor = BaseCompressor.get_value_from_registry(format_name)
    made = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}, scheme)
    if is_symmetric:
        made.pop("weight_zero_point", None)
    folder.mkdir()
    save_file({f"m.{name}": part.contiguous() for name, part in made.items()}, folder / "model.safetensors")
    declared = {"quant_method": "compressed-tensors", "format": format_name}
    declared["config_groups"] = {"group_0": scheme.model_dump(mode="json", exclude_none=True)}
    (folder / "config.json").write_text(json.dumps({"quantization_config": declared}))
    return compressor.decompress(dict(made), scheme)["weight"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]} {layout[1]}{layout[2]}")
def test_each_strategy_of_the_library_is_read_as_it_reads_it(tmp_path, layout):
    """Zero points, too."""
    for strategy in STRATEGIES:
        for is_symmetric in (True, False):
            folder = tmp_path / f"{strategy} {is_symmetric}"
            expected = of_the_library(folder, layout, strategy, is_symmetric)
            assert torch.equal(QuantizedCheckpoint(folder).tensor("m.weight").to(expected.dtype), expected), folder.name


def test_groups_of_a_matrix_that_is_read_in_ranges_of_rows(tmp_path):
    """As many rows in a range as a block has, where groups were once taken for blocks."""
    expected = of_the_library(tmp_path / "hf", LAYOUTS[0], "group 128", True, rows=260, columns=8192)
    values = QuantizedCheckpoint(tmp_path / "hf")
    assert torch.equal(values.tensor("m.weight").to(expected.dtype), expected)
    full = values.full_scale("m.weight", slice(0, 260)).expand(260, 8192)
    assert (expected.float().abs() <= full).all()
    assert len(full[0].unique()) > 32, "a scale for each group"


def test_scales_that_fit_no_declared_strategy_are_rejected(tmp_path):
    of_the_library(tmp_path / "hf", LAYOUTS[0], "group 32", True)
    config = tmp_path / "hf" / "config.json"
    declared = json.loads(config.read_text())
    config.write_text(config.read_text().replace('"group_size": 32', '"group_size": 64'))
    with rejected("scales-shape", "m.weight"):
        QuantizedCheckpoint(tmp_path / "hf").tensor("m.weight")
    groups = declared["quantization_config"]["config_groups"]
    groups["group_1"] = {**groups["group_0"], "weights": {**groups["group_0"]["weights"], "group_size": 64}}
    config.write_text(json.dumps(declared))
    with rejected("unsupported-quantization", "2 different weights"):
        QuantizedCheckpoint(tmp_path / "hf")


def test_channels_without_a_common_divisor_are_read_in_ranges_of_rows(quantized):
    for name in ("block", "channel", "tensor"):
        values = QuantizedCheckpoint(quantized[name])
        whole = values.rows(DENSE, slice(0, 256))
        assert torch.equal(torch.cat([values.rows(DENSE, slice(0, 128)), values.rows(DENSE, slice(128, 256))]), whole)


# ---- the report ----


@pytest.mark.parametrize("name", FORMATS)
def test_the_report_is_measured_on_what_is_served(source, quantized, name):
    report = verify_weights(source, quantized[name], num_threads=2)
    origin, values = CheckpointReader(source), QuantizedCheckpoint(quantized[name])
    experts = [n for n in origin if ".experts." in n and values.is_quantized(n)]
    squares = errors = largest = 0.0
    stored = 0
    for expert in experts:
        weight = origin.tensor(expert).double()
        error = values.rows(expert, slice(0, len(weight))).double() - weight
        squares += weight.square().sum().item()
        errors += error.square().sum().item()
        largest = max(largest, error.abs().max().item())
        stored += sum(values.parts(expert).values())
    row = report["experts"]
    assert row["relative_error"] == pytest.approx((errors / squares) ** 0.5, rel=1e-5)
    assert row["max_abs_error"] == pytest.approx(largest, rel=1e-5)
    assert 0 < row["max_scaled_error"] <= {"nvfp4": 1 / 6, "int4": 0.54 / 7}.get(name, 16 / 448) * 1.01
    assert (row["num_tensors"], row["num_elements"]) == (len(experts), len(experts) * 256 * 128)
    assert row["num_saturated"] == report["all"]["num_saturated"] == 0
    assert row["bytes_after"] == stored
    assert row["compression"] == pytest.approx(len(experts) * 2 * 256 * 128 / stored, rel=1e-5)
    classes = {"experts"} if name in ERRORS else {"attention", "experts", "shared_experts"}
    assert {"all"} | classes <= set(report)


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
def test_ragged_edges_are_measured_under_their_own_scales(tmp_path, strategy, monkeypatch):
    """257 x 290, 128 rows at a time: the last range is one row."""
    weight = torch.randn(257, 290, generator=torch.Generator().manual_seed(0))
    weight[:128] *= 1e-3
    weight[256:, 128:] *= 1e4
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    save_file({DENSE: weight}, tmp_path / "hf" / "model.safetensors")
    folder = recode(Quantization(tmp_path / "hf", FORMATS[strategy]), tmp_path / "fp8")
    monkeypatch.setitem(fp8.SLAB_ELEMENTS, "cpu", 1)
    row = verify_weights(tmp_path / "hf", folder)["all"]
    codes, scale = fp8.quantize_block(weight) if strategy == "block" else getattr(fp8, f"quantize_{strategy}")(weight)
    steps = fp8.dequantize(torch.ones_like(codes), scale) * 448
    expected = ((fp8.dequantize(codes, scale) - weight).abs() / steps).max().item()
    assert row["max_scaled_error"] == pytest.approx(expected, rel=1e-5)
    assert row["num_saturated"] == 0


def test_weights_that_were_cut_off_are_counted(tmp_path, source, quantized):
    shutil.copytree(source, tmp_path / "hf")
    path = tmp_path / "hf" / CheckpointReader(source).file_of(EXPERT)
    replace(path, EXPERT, lambda weight: weight.index_fill(1, torch.tensor([5]), 30.0))
    report = verify_weights(tmp_path / "hf", quantized["block"])
    assert report["experts"]["num_saturated"] == 128
    assert report["experts"]["max_abs_weight"] == 30.0


def replace(path, name, change):
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_copy_that_differs_and_codes_that_are_not_finite_are_named(tmp_path, source, quantized):
    shutil.copytree(quantized["block"], tmp_path / "fp8")
    reader = CheckpointReader(quantized["block"])
    replace(tmp_path / "fp8" / reader.file_of("lm_head.weight"), "lm_head.weight", lambda weight: weight + 1)
    nan = torch.tensor(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    replace(tmp_path / "fp8" / reader.file_of(EXPERT), EXPERT, lambda codes: codes.index_put_((torch.tensor(3),), nan))
    with pytest.raises(CheckpointError) as error:
        verify_weights(source, tmp_path / "fp8")
    assert "lm_head.weight: was copied, and differs" in str(error.value)
    assert f"{EXPERT}: code * scale is NaN or infinite" in str(error.value)
    with rejected("values-not-finite", f"{EXPERT}: 256 of "):
        recode(CastToBf16(tmp_path / "fp8"), tmp_path / "bf16")


# ---- what is refused ----


def test_a_source_that_is_not_quantised_is_not_cast(source):
    with rejected("not-quantized"):
        CastToBf16(source)


def test_a_method_that_is_not_read_is_named(tmp_path, quantized):
    shutil.copytree(quantized["block"], tmp_path / "awq")
    (tmp_path / "awq" / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with rejected("unsupported-quantization", "quant_method 'awq'"):
        CastToBf16(tmp_path / "awq")


@pytest.mark.parametrize("sides", [[1, 128], [96, 96]])
def test_other_blocks_are_named(tmp_path, quantized, sides):
    shutil.copytree(quantized["block"], tmp_path / "fp8")
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": sides}}))
    with rejected("unsupported-quantization", "blocks of"):
        CastToBf16(tmp_path / "fp8")


def test_scales_that_do_not_fit_or_are_missing_are_named(tmp_path):
    codes = torch.zeros(256, 256, dtype=torch.float8_e4m3fn)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    save_file({DENSE: codes, f"{DENSE}_scale_inv": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    with rejected("scales-shape", "[3, 2]", "256 rows"):
        recode(CastToBf16(tmp_path), tmp_path / "bf16")
    save_file({DENSE: codes}, tmp_path / "model.safetensors")
    with rejected("scales-missing", "F8_E4M3 [256, 256]"):
        CastToBf16(tmp_path)
