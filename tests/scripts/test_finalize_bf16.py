import random

from tests.scripts.test_cast_to_bf16 import make_quantized_store
from tests.support.checkpoint_store import NUM_PARTS, assert_same_folder, make_in_parts, run_here
from tests.support.killing import run_killed

from posttrain.artifacts import read_receipt, receipt_of
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader


def test_the_last_step_survives_kills_and_ends_with_the_same_bytes(tmp_path):
    store, undisturbed = make_quantized_store(tmp_path / "killed"), make_quantized_store(tmp_path / "undisturbed")
    for part in range(NUM_PARTS):
        run_here("cast_to_bf16", store.part("bf16", part))
    folder = store.folder("bf16")
    endings = run_killed(
        "finalize_bf16",
        store.finalize("bf16"),
        tmp_path,
        [*sorted(random.Random(8).sample(range(1, 24), 6)), 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 5
    assert endings[-1] == 0
    make_in_parts(undisturbed, "bf16", "cast_to_bf16", "finalize_bf16")
    assert_same_folder(folder, undisturbed.folder("bf16"))
    assert {info.dtype for info in CheckpointReader(folder).infos.values()} == {"BF16", "F32"}
    assert read_receipt(receipt_of(folder)).inputs == {"hf": read_receipt(receipt_of(store.source)).digest}
