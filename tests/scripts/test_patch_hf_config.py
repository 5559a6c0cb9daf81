import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.killing import SCRIPTS, run_killed
from tests.support.resolved_words import words_with
from tests.support.small_checkpoint import ARCHITECTURE, make_small_checkpoint

from posttrain.artifacts import Receipt, read_receipt, receipt_of, record_files, require_files, write_receipt
from posttrain.config.schema import Patch


@pytest.fixture
def source(tmp_path):
    folder = make_small_checkpoint(tmp_path / "hf")
    write_receipt(receipt_of(folder), Receipt("download_hf_checkpoint", record_files(folder), {}, {}))
    return folder


def _arguments(source: Path, target: str, destination: Path, **dimensions: int) -> list[object]:
    return [
        "--source",
        source,
        "--source-receipt",
        receipt_of(source),
        "--folder",
        destination,
        "--receipt",
        receipt_of(destination),
        *words_with(dataclasses.replace(ARCHITECTURE, **dimensions), model={"patch": Patch(target)}),
    ]


def _run(arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPTS / "patch_hf_config.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("target", ["native", "deepseek_v32"])
def test_patching_survives_kills_and_ends_with_the_same_bytes(source, tmp_path, target):
    before = record_files(source)
    points = random.Random(3).sample(range(1, 40), 8)
    arguments = _arguments(source, target, tmp_path / "patched")
    claim = tmp_path / "patched", receipt_of(tmp_path / "patched")
    endings = run_killed("patch_hf_config", arguments, tmp_path, [*points, 10**9], claim=claim, again=[claim[1]])
    assert endings.count(-9) >= 5
    assert endings[-1] == 0
    receipt = require_files(tmp_path / "patched", receipt_of(tmp_path / "patched"), content=True)
    assert receipt.inputs == {"hf": read_receipt(receipt_of(source)).digest}
    assert sorted(path.name for path in (tmp_path / "patched").iterdir()) == [f.path for f in receipt.files]
    assert record_files(source) == before
    undisturbed = _arguments(source, target, tmp_path / "undisturbed")
    assert run_killed("patch_hf_config", undisturbed, tmp_path, [10**9]) == [0]
    assert read_receipt(receipt_of(tmp_path / "undisturbed")).digest == receipt.digest


def test_all_differences_are_one_message_before_anything_is_written(source, tmp_path):
    done = _run(_arguments(source, "native", tmp_path / "patched", hidden_size=64, index_topk=8))
    assert done.returncode == 1
    for words in (
        "3 problems",
        "config.json: hidden_size = 32",
        "allowed: 64",
        "config.json: index_topk = 4",
        "model.embed_tokens.weight: BF16 [64, 32], expected BF16 [64, 64]",
    ):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "patched").exists()
    assert not (tmp_path / "patched.partial").exists()


def test_a_source_that_lost_a_shard(source, tmp_path):
    (source / "model-00003-of-00003.safetensors").unlink()
    done = _run(_arguments(source, "native", tmp_path / "patched"))
    assert done.returncode == 1
    assert "model-00003-of-00003.safetensors: missing" in done.stderr
    assert "Traceback" not in done.stderr
