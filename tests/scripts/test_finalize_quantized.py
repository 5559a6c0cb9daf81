import json
import random

import pytest
from tests.support.checkpoint_store import (
    NUM_PARTS,
    assert_same_folder,
    make_quantized,
    make_quantized_store,
    make_store,
    run_here,
)
from tests.support.killing import run_killed
from tests.support.resolved_words import words_with

from posttrain.artifacts import part_receipt_of, read_receipt, receipt_of
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.quantization.quantized_names import tensor_class
from posttrain.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "step", "source", "dtypes"),
    [
        ("rollout_fp8", "finalize_rollout_fp8", "hf_patched", {"BF16", "F32", "F8_E4M3"}),
        ("serving", "finalize_serving", "hf_patched", {"BF16", "F32", "U8", "F8_E4M3"}),
        ("bf16", "finalize_bf16", "hf", {"BF16", "F32"}),
    ],
)
def test_the_last_step_survives_kills_and_ends_with_the_same_bytes(tmp_path, name, step, source, dtypes):
    make = make_quantized_store if name == "bf16" else make_store
    store, undisturbed = make(tmp_path / "killed"), make(tmp_path / "undisturbed")
    for part in range(NUM_PARTS):
        run_here("quantize", store.part(name, part))
    folder = store.folder(name)
    endings = run_killed(
        "finalize_quantized",
        store.finalize(name),
        tmp_path,
        [*sorted(random.Random(5).sample(range(1, 24), 7)), 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 6
    assert endings[-1] == 0
    make_quantized(undisturbed, name)
    assert_same_folder(folder, undisturbed.folder(name))
    receipt = read_receipt(receipt_of(folder))
    assert receipt.step == step
    assert receipt.inputs == {source: read_receipt(receipt_of(store.source)).digest}
    assert {info.dtype for info in CheckpointReader(folder).infos.values()} == dtypes
    declared = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    methods = {"rollout_fp8": "fp8", "serving": "modelopt", "bf16": None}
    assert declared.get("quant_method") == methods[name]


def test_a_part_that_has_not_finished_is_named(tmp_path):
    store = make_store(tmp_path)
    for part in range(NUM_PARTS):
        run_here("quantize", store.part("rollout_fp8", part))
    part_receipt_of(store.folder("rollout_fp8"), 1).unlink()
    with pytest.raises(CheckpointError, match=r"1\.receipt\.json: no such receipt; the step before has not"):
        run_here("finalize_quantized", store.finalize("rollout_fp8"))


def test_a_changed_calibration_file_writes_the_shards_again(tmp_path):
    store = make_store(tmp_path)
    expert = "model.layers.{}.mlp.experts.0.{}_proj"
    modules = [expert.format(layer, p) for layer in (1, 2) for p in ("gate", "up", "down")]
    calibration = tmp_path / "pass.json"

    def input_scales(amax):
        calibration.write_text(json.dumps({f"{module}.input_quantizer._amax": amax for module in modules}))
        calibrated = words_with(serving={"calibration": [str(calibration)]})
        for part in range(NUM_PARTS):
            run_here("quantize", [*store.part("serving", part), *calibrated])
        run_here("finalize_quantized", [*store.finalize("serving"), *calibrated])
        reader = CheckpointReader(store.folder("serving"))
        names = [n for n in reader if n.endswith("input_scale") and tensor_class(n.replace("input_scale", "weight"))]
        return {reader.tensor(name).item() for name in names}

    assert input_scales(2688.0) == {1.0}
    assert input_scales(5376.0) == {2.0}
