"""What `test_nvfp4.py` does not show of calibration files: whose they are."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY, TINY_QWEN3_MOE, make_random_checkpoint

from posttrain.checkpoint.quantization.quantize import open_recoding


def write_pass(file: Path, layer: int, num_experts: int) -> Path:
    names = (f"model.layers.{layer}.mlp.experts.{expert}" for expert in range(num_experts))
    projections = ("gate_proj", "up_proj", "down_proj")
    save_file({f"{n}.{p}.input_quantizer._amax": torch.tensor(3.0) for n in names for p in projections}, file)
    return file


def test_magnitudes_of_another_model_are_refused(tmp_path: Path) -> None:
    make_random_checkpoint(tmp_path / "hf", TINY)
    own = write_pass(tmp_path / "own.safetensors", TINY.num_hidden_layers - 1, TINY.n_routed_experts)
    open_recoding(tmp_path / "hf", {"format": "nvfp4", "calibration": [own]})
    more = write_pass(tmp_path / "more.safetensors", TINY.num_hidden_layers - 1, TINY.n_routed_experts + 1)
    with rejected("calibration-of-another-model", "more.safetensors", "3 of its modules"):
        open_recoding(tmp_path / "hf", {"format": "nvfp4", "calibration": [own, more]})


def test_a_layer_that_no_pass_has_seen_is_refused(tmp_path: Path) -> None:
    make_random_checkpoint(tmp_path / "hf", TINY_QWEN3_MOE)
    file = write_pass(tmp_path / "pass.safetensors", 0, TINY_QWEN3_MOE.n_routed_experts)
    recoding = open_recoding(tmp_path / "hf", {"format": "nvfp4", "calibration": [file]})
    base = "model.layers.{}.mlp.experts.2.down_proj"
    made = recoding.recode(f"{base.format(0)}.weight")
    assert made[f"{base.format(0)}.input_scale"] == torch.tensor(3.0) / 2688
    with rejected("expert-not-calibrated", "layers.1."):
        recoding.recode(f"{base.format(1)}.weight")
