import json

import pytest
from tests.support.checkpoint_store import make_rollout_fp8, make_store, run_here

from posttrain.store import read_receipt, receipt_of


@pytest.fixture
def arguments(tmp_path):
    store = make_store(tmp_path)
    make_rollout_fp8(store)
    folder = store.folder("rollout_fp8")
    source = ["--source", store.source, "--source-receipt", receipt_of(store.source)]
    return [*source, "--folder", folder, "--receipt", receipt_of(folder), "--report", tmp_path / "report.json"]


def test_the_report_names_what_was_compared(tmp_path, arguments):
    run_here("verify_rollout_weights", [*arguments, "--threads", 2])
    report = json.loads((tmp_path / "report.json").read_text())
    digests = {name: read_receipt(receipt_of(tmp_path / folder)).digest for name, folder in INPUTS.items()}
    assert report["inputs"] == digests
    assert set(report["classes"]) == {"all", "attention", "indexer", "dense_mlp", "experts", "shared_experts"}
    assert 0.01 < report["classes"]["all"]["relative_error"] < 0.04


INPUTS = {"source": "hf_patched", "quantized": "rollout_fp8"}


def test_a_folder_that_is_not_complete_is_refused(tmp_path, arguments):
    shard = next((tmp_path / "rollout_fp8").glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(Exception, match=shard.name):
        run_here("verify_rollout_weights", arguments)
    assert not (tmp_path / "report.json").exists()
