import random
import shutil

import pytest
from tests.support.checkpoint_store import Store, make_rollout_fp8, make_store, run_here
from tests.support.killing import run_killed

from posttrain.artifacts import part_receipt_of, partial_of, read_receipt, receipt_of, require_files
from posttrain.errors import CheckpointError


def make_quantized_store(root):
    """Return a store whose source is quantised."""
    first = make_store(root / "first")
    make_rollout_fp8(first)
    store = Store(root)
    shutil.copytree(first.folder("rollout_fp8"), store.source)
    shutil.copy(receipt_of(first.folder("rollout_fp8")), receipt_of(store.source))
    return store


def test_a_part_survives_kills_and_ends_with_the_same_bytes(tmp_path):
    store, undisturbed = make_quantized_store(tmp_path / "killed"), make_quantized_store(tmp_path / "undisturbed")
    folder, receipt = store.folder("bf16"), part_receipt_of(store.folder("bf16"), 0)
    points = sorted(random.Random(7).sample(range(1, 13), 8))
    arguments = [*store.part("bf16", 0), "--threads", 2]
    endings = run_killed("cast_to_bf16", arguments, tmp_path, [*points, 10**9], claim=(partial_of(folder), receipt))
    assert endings.count(-9) >= 7
    assert endings[-1] == 0
    run_here("cast_to_bf16", undisturbed.part("bf16", 0))
    expected = read_receipt(part_receipt_of(undisturbed.folder("bf16"), 0))
    assert require_files(partial_of(folder), receipt, content=True) == expected


def test_a_source_in_bf16_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nothing in it is quantised"):
        run_here("cast_to_bf16", make_store(tmp_path).part("bf16", 0))
