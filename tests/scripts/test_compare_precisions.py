import json
import random
import time
from itertools import count

import pytest
from tests.support.fault_record import FaultRecord
from tests.support.killing import LAYER_BY_LAYER, run_killed
from tests.support.precisions import run_script, said_by
from tests.support.rejections import assert_rejected

from posttrain.store import Receipt, receipt_of, record_files, write_receipt
from posttrain_serving.precision.divergence import CheckpointLogprobs, Sample, divergence

# Nine of ten seconds are imports. Two threads that wait for each other take ten times as long on a busy machine.
QUICK = {"imports": ["posttrain.rl.evaluation.divergence", *LAYER_BY_LAYER], "env": {"OMP_NUM_THREADS": "1"}}


def words_of(folder, words, checkpoints, output):
    names = ("original", "nvfp4")
    more = ["--original-receipt", receipt_of(checkpoints[0]), "--checkpoints", *checkpoints]
    return [*words[:2], *more, "--said", *(said_by(folder, name) for name in names), "--output", output]


def compare(folder, words, checkpoints):
    words = words_of(folder, words, checkpoints, folder / "precisions.json")
    return run_script("compare_precisions", words)


@pytest.fixture(scope="module")
def compared(asked):
    """What the step writes and prints of a random checkpoint in NVFP4, which the embedded engine reads as numbers."""
    folder, words = asked
    ended = compare(folder, words, [folder / "hf", folder / "nvfp4"])
    assert ended.returncode == 0, ended.stderr
    return folder, words, json.loads((folder / "precisions.json").read_text()), ended.stdout


def test_each_precision_has_a_row(compared):
    *_, found, printed = compared
    original, nvfp4 = found["precisions"]
    assert (original["precision"], nvfp4["precision"]) == ("original", "nvfp4")
    assert original["divergence"] is original["engine_divergence"] is None
    assert nvfp4["divergence"]["mean"] > 0
    assert original["engine_gib"] > nvfp4["engine_gib"]
    assert all(row["tokens_per_second"] > 0 for row in found["precisions"])
    assert len({row["checkpoint"] for row in found["precisions"]}) == 2
    assert found["because"].startswith(f"deploy {found['deploy']}: ")
    assert found["because"] in printed
    assert "activations stay in FP32" in printed
    assert "nvfp4 is served by the embedded engine" in printed


def test_the_engines_say_what_the_weights_do(compared):
    """The embedded engine computes in FP32, too: a few tokens of 256 are left out, and nothing else differs."""
    *_, found, _ = compared
    nvfp4 = found["precisions"][1]
    weights, engines = nvfp4["divergence"], nvfp4["engine_divergence"]
    assert engines["num_tokens"] == weights["num_tokens"]
    assert engines["same_first"] == weights["same_first"]
    assert 0 < engines["covered"] < 1
    assert 0.05 * weights["mean"] < engines["mean"] <= weights["mean"] * (1 + 1e-3)


def test_it_is_taken_over_what_the_original_has_said(compared):
    """KL again over some tokens is of the same size."""
    folder, _, found, _ = compared
    told = found["precisions"][1]["divergence"]
    samples = [Sample(tuple(range(2, 20)), 10)]
    again = divergence(CheckpointLogprobs(folder / "hf", samples), CheckpointLogprobs(folder / "nvfp4", samples))
    assert 0.05 < again.mean / told["mean"] < 20


def test_what_another_checkpoint_said_is_refused(compared, tmp_path):
    folder, words, *_ = compared
    other = tmp_path / "other"
    other.mkdir()
    for file in (folder / "nvfp4").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "more.txt").write_text("1")
    write_receipt(receipt_of(other), Receipt("finalize_serving", record_files(other), {}, {}))
    ended = compare(folder, words, [folder / "hf", other])
    assert ended.returncode == 1
    assert_rejected(ended.stderr, "answers-of-another-checkpoint", "nvfp4.json")


@pytest.mark.timeout(1800)
@pytest.mark.faults("kills")
@pytest.mark.parametrize("before", ["", '{"deploy": "what was found before"}\n'])
def test_killed_anywhere_a_comparison_is_whole_or_the_one_before(compared, tmp_path, before):
    folder, words, found, _ = compared
    output = tmp_path / "output" / "precisions.json"
    output.parent.mkdir()
    words = words_of(folder, words, [folder / "hf", folder / "nvfp4"], output)
    if before:
        output.write_text(before)
    for point in count(1):
        ending = run_killed("compare_precisions", words, output.parent, [point], **QUICK)
        content = output.read_text() if output.exists() else ""
        if ending == [0]:
            break
        assert ending == [-9]
        assert content == before or json.loads(content) == found
    assert json.loads(content) == found
    assert point > 2, "it is written beside, and renamed"


@pytest.mark.timeout(1800)
@pytest.mark.faults("kills")
def test_killed_at_any_time_a_comparison_leaves_the_one_before(compared, faults: FaultRecord):
    """The checkpoints that are compared, and what engines said of them, keep their bytes, too."""
    folder, words, *_ = compared
    words = words_of(folder, words, [folder / "hf", folder / "nvfp4"], folder / "precisions.json")
    rng, started, kills = random.Random(9), time.monotonic(), 0
    while kills < 30:
        points = [10**9, *(rng.uniform(0, 1) for _ in range(32)), 10**9]
        endings = run_killed("compare_precisions", words, folder, points, kept=folder, timeout=1500, **QUICK)
        assert (set(endings), endings[-1]) == ({0, -9}, 0)
        kills += endings.count(-9)
    assert [*folder.rglob("*.tmp")] == []
    faults.add_counts("kills", {"compare_precisions": kills}, time.monotonic() - started)
    faults.equal = True
