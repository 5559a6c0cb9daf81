import random

import pytest
from tests.scripts.checkpoint_store import assert_same_folder, make_store, make_torch_dist, run_here
from tests.scripts.killing import run_killed

from posttrain.artifacts import read_receipt, receipt_of
from posttrain.checkpoint.export import final_weights_sha256
from posttrain.errors import CheckpointError


@pytest.fixture
def store(tmp_path):
    """The converted checkpoint is there."""
    store = make_store(tmp_path / "store")
    make_torch_dist(store)
    return store


def test_an_export_survives_kills_and_ends_with_the_same_bytes(tmp_path, store):
    folder = store.folder("hf")
    points = sorted(random.Random(7).sample(range(1, 26), 8))
    endings = run_killed(
        "export_hf",
        [*store.export(), "--threads", 2],
        tmp_path,
        [*points, 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 8
    assert endings[-1] == 0
    run_here("export_hf", store.export("undisturbed"))
    assert_same_folder(folder, store.folder("undisturbed"))
    receipt = read_receipt(receipt_of(folder))
    assert receipt.settings == {"final_weights_sha256": final_weights_sha256(store.source)}
    assert receipt.inputs == {
        "train": read_receipt(receipt_of(store.folder("torch_dist"))).digest,
        "hf_patched": read_receipt(receipt_of(store.source)).digest,
    }


def test_a_destination_that_is_somebody_elses_is_left_alone(store):
    folder = store.folder("hf")
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="exists, and was not made by export_hf"):
        run_here("export_hf", store.export())
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
