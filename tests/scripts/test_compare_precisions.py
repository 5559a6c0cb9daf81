import json
import subprocess
import sys

import pytest
from tests.support.evaluation_inputs import NUM_PROMPTS, ROOT, make_inputs
from tests.support.folders_in_parts import make_folder

from posttrain.artifacts import Receipt, receipt_of, record_files, write_receipt
from posttrain.checkpoint.parts.recoded_folder import RecodedFolder
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.evaluation.divergence import Sample, Spoken, divergence

# Twenty prompts that nobody answers rightly bound a loss to 16 points.
OVERRIDES = (
    "evaluation.num_samples_per_prompt=2 rollout.max_response_tokens=6 engine.num_threads=1 "
    "evaluation.deployment.num_samples=5 evaluation.deployment.max_kl=1000 evaluation.deployment.max_loss_points=50"
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What the step writes and prints of a random checkpoint in NVFP4, which the embedded engine reads as numbers."""
    folder = tmp_path_factory.mktemp("compared")
    arguments = make_inputs(folder, OVERRIDES)
    original = folder / "hf"
    quantised = folder / "nvfp4"
    make_folder(RecodedFolder(Quantization(original, {"format": "nvfp4"}), "s1"), quantised)
    write_receipt(receipt_of(quantised), Receipt("finalize_serving", record_files(quantised), {}, {}))
    output = folder / "precisions.json"
    words = [*map(str, arguments)]
    for old, new in (("--checkpoint", "--original"), ("--checkpoint-receipt", "--original-receipt")):
        words[words.index(old)] = new
    words += ["--precisions", "nvfp4", "--checkpoints", str(quantised), "--output", str(output)]
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "compare_precisions.py", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return folder, json.loads(output.read_text()), ended.stdout


def test_each_precision_has_a_row(compared):
    _, found, printed = compared
    original, nvfp4 = found["precisions"]
    assert (original["precision"], nvfp4["precision"]) == ("original", "nvfp4")
    assert original["divergence"] is None
    assert nvfp4["divergence"]["mean"] > 0
    assert original["engine_gib"] > nvfp4["engine_gib"]
    assert all(row["tokens_per_second"] > 0 for row in found["precisions"])
    assert len({row["checkpoint"] for row in found["precisions"]}) == 2
    assert found["because"].startswith(f"deploy {found['deploy']}: ")
    assert found["because"] in printed
    assert "activations stay in FP32" in printed


def test_it_is_taken_over_what_the_original_has_said(compared):
    """At most six tokens each of five samples; KL again over some tokens is of the same size."""
    folder, found, _ = compared
    told = found["precisions"][1]["divergence"]
    assert 5 <= told["num_tokens"] <= 5 * 6
    rows = [json.loads(line) for line in (folder / "dataset" / "heldout.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_PROMPTS
    samples = [Sample(tuple(range(2, 20)), 10)]
    again = divergence(Spoken(folder / "hf", samples), Spoken(folder / "nvfp4", samples))
    assert 0.05 < again.mean / told["mean"] < 20
