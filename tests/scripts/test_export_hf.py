import shutil

import pytest
from tests.support.checkpoint_store import make_store, make_torch_dist, run_here
from tests.support.killing import run_killed
from tests.support.rejections import rejected

from posttrain.store import part_receipt_of, partial_of, read_receipt, receipt_of


@pytest.fixture
def store(tmp_path):
    """The converted checkpoint is there."""
    store = make_store(tmp_path / "store")
    make_torch_dist(store)
    return store


def test_a_part_survives_kills_and_ends_with_the_same_bytes(tmp_path, store):
    folder, receipt = store.folder("hf"), part_receipt_of(store.folder("hf"), 0)
    points = range(1, 13)
    endings = run_killed(
        "export_hf",
        [*store.export(0), "--threads", 2],
        tmp_path,
        [*points, 10**9],
        claim=(partial_of(folder), receipt),
    )
    assert endings.count(-9) >= 8
    assert endings[-1] == 0
    run_here("export_hf", store.export(0, "undisturbed"))
    expected = read_receipt(part_receipt_of(store.folder("undisturbed"), 0))
    assert read_receipt(receipt) == expected
    assert expected.inputs == {
        "train": read_receipt(receipt_of(store.folder("torch_dist"))).digest,
        "hf_patched": read_receipt(receipt_of(store.source)).digest,
    }
    assert 0 < len(expected.files) < 3, "a part writes its share of the three shards"


def test_a_destination_that_is_somebody_elses_is_left_alone(store):
    folder = store.folder("hf")
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with rejected("folder-not-ours", "export_hf"):
        run_here("export_hf", store.export(0))
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_checkpoint_of_another_trainer_needs_no_receipt(store):
    """The folder in which Megatron keeps its checkpoints, with the file that names the newest."""
    theirs = store.root / "theirs"
    shutil.copytree(store.folder("torch_dist"), theirs / "iter_0000007")
    (theirs / "latest_checkpointed_iteration.txt").write_text("7")
    arguments = store.export(0)
    start = arguments.index("--train-receipt")
    arguments = [*arguments[:start], *arguments[start + 2 :]]
    arguments[arguments.index("--run-folder") + 1] = theirs
    run_here("export_hf", arguments)
    made = [path.name for path in partial_of(store.folder("hf")).glob("*.safetensors")]
    assert made
    for name in made:
        assert (partial_of(store.folder("hf")) / name).read_bytes() == (store.source / name).read_bytes()
