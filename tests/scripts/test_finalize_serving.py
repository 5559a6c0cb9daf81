import json
import random

from tests.support.checkpoint_store import NUM_PARTS, assert_same_folder, make_in_parts, make_store, run_here
from tests.support.killing import run_killed

from posttrain.artifacts import read_receipt, receipt_of
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.quantization.quantized_names import tensor_class


def test_the_last_step_survives_kills_and_ends_with_the_same_bytes(tmp_path):
    store, undisturbed = make_store(tmp_path / "killed"), make_store(tmp_path / "undisturbed")
    for part in range(NUM_PARTS):
        run_here("quantize_serving", store.part("serving", part))
    folder = store.folder("serving")
    endings = run_killed(
        "finalize_serving",
        store.finalize("serving"),
        tmp_path,
        [*sorted(random.Random(5).sample(range(1, 24), 6)), 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 5
    assert endings[-1] == 0
    make_in_parts(undisturbed, "serving", "quantize_serving", "finalize_serving")
    assert_same_folder(folder, undisturbed.folder("serving"))
    assert read_receipt(receipt_of(folder)).settings["format"] == "nvfp4"
    dtypes = {info.dtype for info in CheckpointReader(folder).infos.values()}
    assert dtypes == {"BF16", "F32", "U8", "F8_E4M3"}


def test_a_changed_calibration_file_writes_the_shards_again(tmp_path):
    store = make_store(tmp_path)
    expert = "model.layers.{}.mlp.experts.0.{}_proj"
    modules = [expert.format(layer, p) for layer in (1, 2) for p in ("gate", "up", "down")]
    calibration = tmp_path / "pass.json"

    def input_scales(amax):
        calibration.write_text(json.dumps({f"{module}.input_quantizer._amax": amax for module in modules}))
        settings = json.dumps({"format": "nvfp4", "calibration": [str(calibration)]})
        for part in range(NUM_PARTS):
            run_here("quantize_serving", [*store.part("serving", part), "--settings", settings])
        run_here("finalize_serving", [*store.finalize("serving"), "--settings", settings])
        reader = CheckpointReader(store.folder("serving"))
        names = [n for n in reader if n.endswith("input_scale") and tensor_class(n.replace("input_scale", "weight"))]
        return {reader.tensor(name).item() for name in names}

    assert input_scales(2688.0) == {1.0}
    assert input_scales(5376.0) == {2.0}
