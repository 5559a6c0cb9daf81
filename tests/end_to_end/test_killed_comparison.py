"""SIGKILL of `compare_precisions` at each of its changes: there is no comparison, or the one before it, whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.evaluation_inputs import make_inputs
from tests.support.folders_in_parts import make_folder
from tests.support.killing import run_killed

from posttrain.artifacts import Receipt, receipt_of, record_files, write_receipt
from posttrain.checkpoint.parts.recoded_folder import RecodedFolder
from posttrain.checkpoint.quantization.quantize import Quantization

OVERRIDES = (
    "evaluation.num_samples_per_prompt=1 rollout.max_response_tokens=4 engine.num_threads=1 "
    "evaluation.deployment.num_samples=2 evaluation.deployment.max_kl=1000 evaluation.deployment.max_loss_points=50"
)
KILLED, ENDED = -9, 0
MOST_CHANGES = 20


@pytest.mark.faults("kills")
def test_a_comparison_is_whole_or_the_one_before(tmp_path: Path) -> None:
    words = [*map(str, make_inputs(tmp_path, OVERRIDES))]
    for old, new in (("--checkpoint", "--original"), ("--checkpoint-receipt", "--original-receipt")):
        words[words.index(old)] = new
    quantised, root = tmp_path / "nvfp4", tmp_path / "evaluation"
    make_folder(RecodedFolder(Quantization(tmp_path / "hf", {"format": "nvfp4"}), "s1"), quantised)
    write_receipt(receipt_of(quantised), Receipt("finalize_serving", record_files(quantised), {}, {}))
    output = root / "precisions.json"
    words += ["--precisions", "nvfp4", "--checkpoints", str(quantised), "--output", str(output)]

    def kill(point: int) -> int:
        return run_killed("compare_precisions", words, root, [point])[0]

    root.mkdir()
    point = 1
    while (ending := kill(point)) == KILLED:
        if output.exists():  # killed behind its last write
            assert "deploy" in json.loads(output.read_text())
            output.unlink()
        point += 1
        assert point < MOST_CHANGES
    assert ending == ENDED
    assert point > 3, "an engine's log for each, and the result"
    before = '{"deploy": "what was found before"}\n'
    for late in (1, point - 2, point - 1):
        output.write_text(before)
        assert kill(late) == KILLED
        assert output.read_text() == before or "precisions" in json.loads(output.read_text())
    assert kill(MOST_CHANGES) == ENDED
    assert "precisions" in json.loads(output.read_text())
