"""The tiny model's real checkpoints, copied in each way and loaded from where they then lie."""

import os
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.staging.node_local import StagedSource
from posttrain.checkpoint.staging.node_weights import NodeWeights
from posttrain.plan.resolve import resolve
from posttrain.store import Paths, read_receipt, receipt_of

CONFIG_DIR = Path(__file__).resolve().parents[4] / "config"
# Of the trainer's checkpoint, and of the engines'.
SHARDS = (".distcp", ".safetensors")
# Two nodes of one rank each, a pipeline stage on each.
TWO_STAGES = "site.node_names=[node0,node1] parallel.pipeline_model_parallel_size=2"


def weights_of(store: Path, folder: Path, rank: int, settings: str, nodes: int = 1) -> NodeWeights:
    words = f"site.store={store} site.node_local={folder} {settings}"
    resolved = resolve({"model": "tiny", "site": "local", "nodes": nodes, "set": words}, CONFIG_DIR)
    paths, name = Paths(resolved), f"node{rank}"
    origins = [StagedSource(path, read_receipt(receipt_of(path))) for path in (paths.torch_dist, paths.rollout_weights)]
    return NodeWeights(resolved.config, rank, name, *origins, paths.node_local(name), folder / "peers")


def flip_a_bit(path: Path) -> None:
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("suffix", [".distcp", ".safetensors"])
def test_a_bad_byte_that_the_staging_record_hides_is_repaired_before_loading(store, tmp_path, suffix):
    weights = weights_of(store, tmp_path, 0, "")
    weights.stage()
    broken = next(weights.destination.rglob(f"*{suffix}"))
    right = broken.read_bytes()
    flip_a_bit(broken)
    assert sum(copy.bytes_copied for copy in weights.stage()) == 0
    weights.prepare()
    assert broken.read_bytes() == right


def test_each_node_gets_its_stage_and_opens_a_whole_checkpoint(store, tmp_path):
    copied = []
    for rank in (0, 1):
        weights = weights_of(store, tmp_path, rank, f"stage.copy=slices {TWO_STAGES}", nodes=2)
        copies = weights.stage()
        copied.append({file.path for file in copies[0].files})
        assert copies[1].links == ()
        folder = weights.folder_of(weights.torch_dist)
        TorchDistReader(folder).check_files()
        assert {path.name for path in folder.iterdir() if path.is_symlink()} == set(copies[0].links)
    assert copied[0] != copied[1]


@pytest.mark.parametrize("choice", ["slices", "everything"])
def test_each_kind_of_node_gets_what_it_loads_and_opens_whole_checkpoints(store, tmp_path, choice):
    words = f"stage.copy={choice} site.node_names=[node0,node1] engine.own_nodes=1"
    for rank in (0, 1):
        weights = weights_of(store, tmp_path, rank, words, nodes=2)
        pairs = zip(weights.stage(), SHARDS, strict=True)
        has_shards = [any(file.path.endswith(suffix) for file in copy.files) for copy, suffix in pairs]
        assert has_shards == [rank == 0, rank == 1]
        for origin in (weights.torch_dist, weights.rollout):
            names = {record.path for record in origin.receipt.files}
            assert names <= {path.name for path in weights.folder_of(origin).iterdir()}


def test_nothing_is_copied_and_a_bad_shared_byte_is_refused(store, tmp_path):
    weights = weights_of(store, tmp_path, 0, "stage.copy=nothing")
    folder = weights.folder_of(weights.torch_dist)
    assert folder == weights.torch_dist.folder
    weights.prepare()
    broken = next(folder.glob("*.distcp"))
    flip_a_bit(broken)
    try:
        with rejected("receipt-mismatch", broken):
            weights.prepare()
    finally:
        flip_a_bit(broken)
    assert not weights.destination.exists()
