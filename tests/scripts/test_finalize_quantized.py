import json
import random
import time

import pytest
from tests.support.checkpoint_store import (
    NUM_PARTS,
    assert_same_folder,
    make_quantized,
    make_quantized_store,
    make_store,
    run_here,
)
from tests.support.fault_record import FaultRecord
from tests.support.killing import run_killed
from tests.support.rejections import rejected
from tests.support.resolved_words import words_with
from tests.support.tiny_checkpoint import TINY

from posttrain.checkpoint.formats.safetensors_io import INDEX_NAME, CheckpointReader
from posttrain.checkpoint.quantization.quantized_names import layer_of, tensor_class
from posttrain.rl.weight_sync.publish import untrained
from posttrain.store import part_receipt_of, partial_of, read_receipt, receipt_of


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


@pytest.mark.faults("kills")
def test_nvfp4_that_is_killed_many_times_has_the_same_bytes(tmp_path, faults: FaultRecord):
    """Each part and the step that joins them: killed at every change of a file, then at random ones."""
    undisturbed, rng, started, kills = make_store(tmp_path / "undisturbed"), random.Random(13), time.monotonic(), 0
    make_quantized(undisturbed, "serving")
    for points in ([*range(1, 31)], [rng.randint(1, 12) for _ in range(30)]):
        store = make_store(tmp_path / f"killed{kills}")
        folder, ends = store.folder("serving"), [*points, 10**9]
        for part in range(NUM_PARTS):
            claim = partial_of(folder), part_receipt_of(folder, part)
            endings = run_killed("quantize", store.part("serving", part), store.root, ends, claim=claim)
            assert (set(endings), endings[-1]) == ({0, -9}, 0)
            kills += endings.count(-9)
        claim = folder, receipt_of(folder)
        endings = run_killed("finalize_quantized", store.finalize("serving"), store.root, ends, claim=claim)
        assert (set(endings), endings[-1]) == ({0, -9}, 0)
        kills += endings.count(-9)
        assert_same_folder(folder, undisturbed.folder("serving"))
    assert kills >= 60
    faults.add_counts("kills", {"quantize and finalize_serving": kills}, time.monotonic() - started)
    faults.equal = True


@pytest.mark.parametrize("drafts", [False, True])
def test_engines_that_begin_empty_have_all_but_the_trained_weights(tmp_path, drafts):
    """The config of the whole checkpoint and the tokenizer, and of tensors what they draft with."""
    store, words = make_store(tmp_path), words_with(TINY, engine={"mtp_steps": 2 * drafts})
    make_quantized(store, "rollout_fp8")
    whole, start = store.folder("rollout_fp8"), store.folder("rollout_start")
    parts = [part_receipt_of(start, 0)] if drafts else []
    common = [*store.finalize("rollout_start")[:6], "--step", "quantize_rollout_start", *words]
    for part in parts:
        run_here("quantize", [*common, "--part", 0, "--num-parts", 1, "--receipt", part])
    run_here("finalize_quantized", [*common, "--part-receipts", *parts, "--receipt", receipt_of(start)])
    assert read_receipt(receipt_of(start)).step == "finalize_rollout_start"
    small = {path.name for path in whole.iterdir() if path.suffix != ".safetensors"} - {INDEX_NAME}
    for name in small:
        assert (start / name).read_bytes() == (whole / name).read_bytes()
    shards = {path.name for path in start.iterdir()} - small - {INDEX_NAME}
    assert bool(shards) is drafts
    assert {record.path for record in read_receipt(receipt_of(start)).files} == small | shards | {INDEX_NAME}
    reader, made = CheckpointReader(whole), CheckpointReader(start) if drafts else {}
    of_drafts = [name for name in reader.names if (layer_of(name) or 0) >= TINY.num_hidden_layers]
    assert list(made) == (of_drafts if drafts else [])
    assert all(made.tensor(name).equal(reader.tensor(name)) for name in made)
    trained = reader.names[: -len(of_drafts)]
    assert [name for name, _ in untrained(trained, start, TINY.num_hidden_layers, drafts)] == list(made)


def test_a_part_that_has_not_finished_is_named(tmp_path):
    store = make_store(tmp_path)
    for part in range(NUM_PARTS):
        run_here("quantize", store.part("rollout_fp8", part))
    part_receipt_of(store.folder("rollout_fp8"), 1).unlink()
    with rejected("receipt-missing", "1.receipt.json"):
        run_here("finalize_quantized", store.finalize("rollout_fp8"))


def test_a_changed_calibration_file_writes_the_shards_again(tmp_path):
    store = make_store(tmp_path)
    expert = "model.layers.{}.mlp.experts.0.{}_proj"
    modules = [expert.format(layer, p) for layer in (1, 2) for p in ("gate", "up", "down")]
    calibration = tmp_path / "pass.json"

    def input_scales(amax):
        calibration.write_text(json.dumps({f"{module}.input_quantizer._amax": amax for module in modules}))
        calibrated = [*words_with(serving={"calibration": [str(calibration)]}), "--calibration", calibration]
        for part in range(NUM_PARTS):
            run_here("quantize", [*store.part("serving", part), *calibrated])
        run_here("finalize_quantized", [*store.finalize("serving"), *calibrated])
        reader = CheckpointReader(store.folder("serving"))
        names = [n for n in reader if n.endswith("input_scale") and tensor_class(n.replace("input_scale", "weight"))]
        return {reader.tensor(name).item() for name in names}

    assert input_scales(2688.0) == {1.0}
    assert input_scales(5376.0) == {2.0}
