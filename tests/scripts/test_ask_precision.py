"""Engines of a precision are asked; what they said is durable, and of one checkpoint."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tests.support.evaluation_inputs import NUM_PROMPTS
from tests.support.fault_record import FaultRecord
from tests.support.killing import run_killed
from tests.support.precisions import ask, make_checkpoints, said_by, words_of

from posttrain.store import read_receipt, receipt_of, require_files
from posttrain_serving.precision.precisions import NUM_LIKELIEST, read_said


def test_all_are_asked_of_what_the_original_said(asked: tuple[Path, list[object]]) -> None:
    """At most six tokens each of five samples."""
    folder, _ = asked
    (original, first), (nvfp4, second) = (read_said(said_by(folder, name)) for name in ("original", "nvfp4"))
    assert (first, second) == tuple(read_receipt(receipt_of(folder / name)).digest for name in ("hf", "nvfp4"))
    assert original.samples == nvfp4.samples
    count = sum(len(one.tokens) - one.num_prompt_tokens for one in original.samples)
    assert 5 <= count <= 5 * 6
    assert original.likeliest.tokens.shape == nvfp4.likeliest.tokens.shape == (count, NUM_LIKELIEST)
    assert not original.likeliest.logprobs.equal(nvfp4.likeliest.logprobs)
    assert [len(each) for each in original.passed.values()] == [2 * NUM_PROMPTS]
    assert original.engine_gib > nvfp4.engine_gib
    assert (original.engine, original.nodes) == ("embedded", 1)


def test_the_receipt_names_all_that_it_was_made_from(asked: tuple[Path, list[object]]) -> None:
    folder, _ = asked
    path = said_by(folder, "nvfp4")
    receipt = require_files(path.parent, receipt_of(path), content=True)
    assert len(receipt.files) == 2
    assert receipt.inputs.keys() == {"checkpoint", "dataset", "original"}
    assert receipt.inputs["original"] == read_receipt(receipt_of(said_by(folder, "original"))).digest


def test_a_damaged_checkpoint_is_not_asked(asked: tuple[Path, list[object]], tmp_path: Path) -> None:
    folder, words = asked
    shard = sorted((folder / "nvfp4").glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        ended = ask(folder, words, "nvfp4", folder / "nvfp4")
    finally:
        shard.write_bytes(content)
    assert ended.returncode == 1
    assert shard.name in ended.stderr


@pytest.mark.faults("slow")
def test_engines_that_the_job_has_started_say_the_same(asked: tuple[Path, list[object]], tmp_path: Path) -> None:
    """As on several nodes: here this machine is the only one."""
    folder, words = asked
    checkpoint = ["--checkpoint", folder / "nvfp4", "--folder", tmp_path / "engines", "--precision", "nvfp4"]
    around = [sys.executable, "-m", "posttrain.cluster.beside_engines", *words[:2], *checkpoint, "--"]
    before = read_said(said_by(folder, "nvfp4"))[0]
    ended = ask(folder, words, "nvfp4", folder / "nvfp4", around)
    assert ended.returncode == 0, ended.stderr
    assert "ready on" in (tmp_path / "engines/node0/engine0.log").read_text()
    after = read_said(said_by(folder, "nvfp4"))[0]
    assert after.passed == before.passed
    assert after.likeliest.tokens.equal(before.likeliest.tokens)
    assert after.likeliest.logprobs.equal(before.likeliest.logprobs)


@pytest.mark.timeout(3600)
@pytest.mark.faults("kills")
def test_killed_anywhere_it_has_said_all_or_nothing(tmp_path: Path, faults: FaultRecord) -> None:
    """Twice: where nothing was said before, and over what was said."""
    words, path = make_checkpoints(tmp_path), said_by(tmp_path, "original")
    words = words_of(tmp_path, words, "original", tmp_path / "hf")
    claim, started, kills = (path.parent, receipt_of(path)), time.monotonic(), 0
    for _ in range(2):
        endings = run_killed("ask_precision", words, path.parent, None, claim=claim, timeout=1800)
        assert endings[-1] == 0
        assert len(endings) > 4, "an engine's log, what it said, its tokens, the receipt"
        assert require_files(path.parent, receipt_of(path), content=True)
        assert read_said(path)[0].precision == "original"
        kills += len(endings) - 1
    assert not (tmp_path / "seen").exists()
    faults.add_counts("kills", {"ask_precision": kills}, time.monotonic() - started)
    faults.equal = True
