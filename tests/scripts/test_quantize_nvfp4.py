import random

from tests.scripts.checkpoint_store import assert_same_folder, make_store, run_here
from tests.scripts.killing import run_killed

from posttrain.artifacts import read_receipt, receipt_of
from posttrain.checkpoint.safetensors_io import CheckpointReader


def test_quantising_survives_kills_and_ends_with_the_same_bytes(tmp_path):
    store, undisturbed = make_store(tmp_path / "killed"), make_store(tmp_path / "undisturbed")
    folder = store.folder("rollout_nvfp4")
    points = sorted(random.Random(6).sample(range(1, 30), 8))
    endings = run_killed(
        "quantize_nvfp4",
        store.whole("rollout_nvfp4"),
        tmp_path,
        [*points, 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 8
    assert endings[-1] == 0
    run_here("quantize_nvfp4", undisturbed.whole("rollout_nvfp4"))
    assert_same_folder(folder, undisturbed.folder("rollout_nvfp4"))
    assert read_receipt(receipt_of(folder)).settings == {"strategy": "nvfp4"}
    dtypes = {info.dtype for info in CheckpointReader(folder).infos.values()}
    assert dtypes == {"BF16", "F32", "U8", "F8_E4M3"}
