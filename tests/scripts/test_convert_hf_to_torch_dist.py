from tests.support.checkpoint_store import make_store, make_torch_dist, run_here
from tests.support.forked_programs import run_step
from tests.support.killing import run_killed
from tests.support.rejections import rejected

from posttrain.store import part_receipt_of, partial_of, read_receipt, receipt_of, require_files


def test_a_part_survives_kills_and_ends_with_the_same_bytes(tmp_path):
    store, undisturbed = make_store(tmp_path / "killed"), make_store(tmp_path / "undisturbed")
    folder, receipt = store.folder("torch_dist"), part_receipt_of(store.folder("torch_dist"), 1)
    points = range(1, 13)
    endings = run_killed(
        "convert_hf_to_torch_dist",
        store.part("torch_dist", 1),
        tmp_path,
        [*points, 10**9],
        claim=(partial_of(folder), receipt),
    )
    assert endings.count(-9) >= 8
    assert endings[-1] == 0
    make_torch_dist(undisturbed)
    expected = part_receipt_of(undisturbed.folder("torch_dist"), 1)
    assert read_receipt(receipt) == read_receipt(expected)
    assert require_files(partial_of(folder), receipt, content=True).inputs == {
        "hf_patched": read_receipt(receipt_of(store.source)).digest
    }
    assert [path.name for path in partial_of(folder).iterdir()] == ["__1_0.distcp"]


def test_a_truncated_shard_is_one_message(tmp_path):
    """As the workflow sees it: an exit code, and what it says."""
    store = make_store(tmp_path)
    shard = store.source / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-100])
    done = run_step("convert_hf_to_torch_dist", store.part("torch_dist", 0))
    assert done.returncode == 1
    assert f"{shard}: {size - 100} bytes, expected {size}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not partial_of(store.folder("torch_dist")).exists()


def test_a_source_without_a_receipt_is_refused(tmp_path):
    store = make_store(tmp_path)
    receipt_of(store.source).unlink()
    with rejected("receipt-missing"):
        run_here("convert_hf_to_torch_dist", store.part("torch_dist", 0))
