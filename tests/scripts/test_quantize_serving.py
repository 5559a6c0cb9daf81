import random

from tests.support.checkpoint_store import make_in_parts, make_store
from tests.support.killing import run_killed

from posttrain.artifacts import part_receipt_of, partial_of, read_receipt, require_files


def test_a_part_survives_kills_and_ends_with_the_same_bytes(tmp_path):
    store, undisturbed = make_store(tmp_path / "killed"), make_store(tmp_path / "undisturbed")
    folder, receipt = store.folder("serving"), part_receipt_of(store.folder("serving"), 1)
    points = sorted(random.Random(6).sample(range(1, 13), 8))
    endings = run_killed(
        "quantize_serving",
        [*store.part("serving", 1), "--threads", 2],
        tmp_path,
        [*points, 10**9],
        claim=(partial_of(folder), receipt),
    )
    assert endings.count(-9) >= 7
    assert endings[-1] == 0
    make_in_parts(undisturbed, "serving", "quantize_serving", "finalize_serving")
    expected = read_receipt(part_receipt_of(undisturbed.folder("serving"), 1))
    assert require_files(partial_of(folder), receipt, content=True) == expected
