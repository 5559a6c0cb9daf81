import json
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.forked_programs import run_step
from tests.support.killing import SCRIPTS, run_killed
from tests.support.resolved_words import resolved_words

from posttrain.store import FORMAT_VERSIONS, Receipt, receipt_of, record_files, write_receipt

CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"


@pytest.fixture
def store(tmp_path):
    """Two artefacts of 20 files each, with their receipts."""
    numbers = random.Random(0)
    for folder, step in (("torch_dist-1", "finalize_torch_dist"), ("rollout_fp8-1", "finalize_rollout_fp8")):
        (tmp_path / "store" / folder).mkdir(parents=True)
        for i in range(20):
            (tmp_path / "store" / folder / f"{i}.bin").write_bytes(numbers.randbytes(5000 + i))
        assert step in FORMAT_VERSIONS
        records = record_files(tmp_path / "store" / folder)
        write_receipt(receipt_of(tmp_path / "store" / folder), Receipt(step, records, {}, {}))
    return tmp_path / "store"


def _arguments(store: Path, node: Path) -> list[object]:
    settings = f"site.node_names=[node0,node1] stage.workers=1 site.store={store}"
    return [
        *resolved_words({"model": "tiny", "site": "local", "set": settings}, store.parent),
        *("--torch-dist", store / "torch_dist-1", "--torch-dist-receipt", receipt_of(store / "torch_dist-1")),
        *("--rollout-weights", store / "rollout_fp8-1", "--rollout-receipt", receipt_of(store / "rollout_fp8-1")),
        *("--destination", node / "model" / "revision", "--node", node.name, "--peers", store / "broadcast"),
        *("--record", node.with_suffix(".json")),
    ]


def _run(arguments, **options) -> subprocess.CompletedProcess:
    """Run the script in a process of its own, which may have limits of its own."""
    command = [sys.executable, SCRIPTS / "stage_to_node_local.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_staging_survives_kills_and_ends_with_the_right_bytes(store, tmp_path):
    node = tmp_path / "node0"
    arguments = _arguments(store, node)
    points = random.Random(2).sample(range(1, 25), 6)
    endings = run_killed("stage_to_node_local", arguments, tmp_path, [*points, 10**9])
    assert endings == [-9] * 6 + [0]
    for name in ("torch_dist-1", "rollout_fp8-1"):
        assert record_files(node / "model" / "revision" / name) == record_files(store / name)
    record = json.loads((tmp_path / "node0.json").read_text())
    assert record["bytes_kept"] > 0
    assert record["bytes_copied"] + record["bytes_kept"] == 2 * sum(5000 + i for i in range(20))


def test_a_source_without_its_file_is_one_message(store, tmp_path):
    (store / "torch_dist-1" / "3.bin").unlink()
    done = run_step("stage_to_node_local", _arguments(store, tmp_path / "node0"))
    assert done.returncode == 1
    assert "3.bin: missing, expected 5003 bytes" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "node0.json").exists()


def test_a_full_disk_is_one_message_and_leaves_no_record(store, tmp_path):
    """A limit on file sizes stands for the full disk."""
    arguments = _arguments(store, tmp_path / "node0")
    done = _run(arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5010, 5010)))
    assert done.returncode == 1
    assert "raise the limit (`ulimit -f`)" in done.stderr
    assert "then run the same command again: what is finished is kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "node0.json").exists()
    assert not list((tmp_path / "node0").rglob("*.tmp"))
