from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.checkpoint_store import make_store
from tests.support.folders_in_parts import make_folder
from tests.support.rejections import rejected

from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.parts.converted_folder import RecodedFolder
from posttrain.checkpoint.quantization.dequantize import QuantizedCheckpoint
from posttrain.checkpoint.quantization.quantize import open_recoding
from posttrain_serving.activation_scales import UNCALIBRATED_VARIABLE, check_scales
from posttrain_serving.checkpoint import find_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Return a folder in NVFP4 that nobody has calibrated."""
    root = tmp_path_factory.mktemp("nvfp4")
    settings = {"format": "nvfp4", "calibration": []}
    make_folder(RecodedFolder(open_recoding(make_store(root).source, settings), "s"), root / "nvfp4")
    return root / "nvfp4"


def copy(made: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in made.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_scales_that_nobody_has_measured_are_refused_unless_asked_for(made: Path, monkeypatch) -> None:
    monkeypatch.delenv(UNCALIBRATED_VARIABLE, raising=False)
    with rejected("scales-not-calibrated", "all 24 input_scale", key="checkpoint"):
        find_checkpoint(str(made), "", [], made)
    monkeypatch.setenv(UNCALIBRATED_VARIABLE, "1")
    assert find_checkpoint(str(made), "nvfp4", [], made).precision == "nvfp4"


def test_one_measured_scale_is_enough(made: Path, tmp_path: Path) -> None:
    folder = copy(made, tmp_path / "calibrated")
    name = next(name for name in QuantizedCheckpoint(folder).reader.names if name.endswith(".input_scale"))
    file = QuantizedCheckpoint(folder).reader.file_of(name)
    from safetensors.torch import load_file

    tensors = load_file(folder / file)
    save_file({**tensors, name: torch.tensor(0.01)}, folder / file, metadata={"format": "pt"})
    check_scales(folder)


def test_a_shard_that_is_cut_off_is_named_by_whoever_reads_the_folder(made: Path, tmp_path: Path) -> None:
    folder = copy(made, tmp_path / "cut")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    readers = (
        lambda: find_checkpoint(str(folder), "", [], folder),
        lambda: QuantizedCheckpoint(folder),
        lambda: open_recoding(folder, {"format": "bf16"}),
    )
    for read in readers:
        with rejected("shards-incomplete", shard.name):
            read()


def test_a_folder_without_shards_is_not_looked_at(made: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((made / "config.json").read_text())
    assert read_object(tmp_path / "config.json")["quantization_config"]["quant_algo"] == "NVFP4"
    check_scales(tmp_path)
