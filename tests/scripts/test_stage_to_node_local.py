import json
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.scripts.killing import SCRIPTS, run_killed

from posttrain.artifacts import FORMAT_VERSIONS, Receipt, receipt_of, record_files, write_receipt


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
    sources = [
        part
        for name in ("torch_dist-1", "rollout_fp8-1")
        for part in ("--source", store / name, "--source-receipt", receipt_of(store / name))
    ]
    return [*sources, "--destination", node, "--node", node.name, "--testimony", node.with_suffix(".json")]


def _run(arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPTS / "stage_to_node_local.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_staging_survives_kills_and_ends_with_the_right_bytes(store, tmp_path):
    node = tmp_path / "node0"
    arguments = [*_arguments(store, node), "--workers", 1]
    points = random.Random(2).sample(range(1, 25), 6)
    endings = run_killed("stage_to_node_local", arguments, tmp_path, [*points, 10**9])
    assert endings == [-9] * 6 + [0]
    for name in ("torch_dist-1", "rollout_fp8-1"):
        assert record_files(node / name) == record_files(store / name)
    testimony = json.loads((tmp_path / "node0.json").read_text())
    assert testimony["bytes_kept"] > 0
    assert testimony["bytes_copied"] + testimony["bytes_kept"] == 2 * sum(5000 + i for i in range(20))


def test_a_source_without_its_file_is_one_message(store, tmp_path):
    (store / "torch_dist-1" / "3.bin").unlink()
    done = _run(_arguments(store, tmp_path / "node0"))
    assert done.returncode == 1
    assert "3.bin: missing, expected 5003 bytes" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "node0.json").exists()


def test_a_full_disk_is_one_message_and_leaves_no_testimony(store, tmp_path):
    """A limit on file sizes stands for the full disk."""
    arguments = _arguments(store, tmp_path / "node0")
    done = _run(arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5010, 5010)))
    assert done.returncode == 1
    assert "free some space and run again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "node0.json").exists()
    assert not list((tmp_path / "node0").rglob("*.tmp"))


def test_each_source_needs_its_receipt_and_a_name_of_its_own(store, tmp_path):
    arguments = _arguments(store, tmp_path / "node0")
    assert "one --source-receipt per --source" in _run(arguments[:2] + arguments[4:]).stderr
    assert "different folder names" in _run(arguments[:4] + arguments).stderr
