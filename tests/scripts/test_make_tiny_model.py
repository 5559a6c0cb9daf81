import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from tests.support.forked_programs import run_program, run_step
from tests.support.killing import SCRIPTS
from tests.support.resolved_words import words_with
from tests.support.tiny_checkpoint import TINY

from posttrain.store import read_receipt, receipt_of, require_files

# The same script on fewer steps, with every pass rate accepted.
SHORT = """
from tests.support import killing
from posttrain.checkpoint.tiny import model as tiny_model, warm_up as tiny_warm_up
tiny_warm_up.NUM_STEPS, tiny_model.PASS_RATE_LIMITS = 2, (0.0, 1.0)
killing.main()
"""


def _arguments(folder, architecture=TINY, num_digits: int = 2, seed: int = 0) -> list[str]:
    return [
        *words_with(architecture),
        "--num-digits",
        str(num_digits),
        "--seed",
        str(seed),
        "--folder",
        str(folder),
        "--receipt",
        str(receipt_of(folder)),
    ]


def _run_killed(folder, points: list[int]) -> list[int]:
    """Run the script once per point, killed at that change of the file system; each run goes on from the last."""
    order = {
        "script": str(SCRIPTS / "make_tiny_model.py"),
        "arguments": _arguments(folder),
        "root": str(folder.parent),
        "points": points,
        "claim": [str(folder), str(receipt_of(folder))],
    }
    program = folder.parent.with_suffix(".py")
    program.write_text(SHORT)
    done = run_program(program, json.dumps(order))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kills_at_any_point_end_with_the_same_bytes(tmp_path):
    undisturbed, killed = tmp_path / "a" / "model", tmp_path / "b" / "model"
    undisturbed.parent.mkdir()
    killed.parent.mkdir()
    assert _run_killed(undisturbed, [999]) == [0]
    # While the folder is new, half there, about to get its name, without a receipt; what is finished is left alone.
    endings = _run_killed(killed, [1, 5, 12, 19, 999, 2])
    assert endings == [-9, -9, -9, -9, 0, 0]
    assert read_receipt(receipt_of(killed)) == read_receipt(receipt_of(undisturbed))
    require_files(killed, receipt_of(killed), content=True)
    assert {path.name for path in killed.parent.iterdir()} == {path.name for path in undisturbed.parent.iterdir()}


def test_what_cannot_be_made_is_refused_in_one_message(tmp_path):
    done = run_step("make_tiny_model", _arguments(tmp_path / "model", dataclasses.replace(TINY, vocab_size=32)))
    assert done.returncode == 1
    assert "model.architecture.vocab_size = 32" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.lease"], "nothing but the lock, which is free again"


@pytest.mark.slow
@pytest.mark.faults("slow")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_warmed_up_model_passes_as_often_as_it_should(tmp_path, seed):
    """Every chain begins with that of seed 0 (tests/end_to_end/test_chain.py); learning is shown on three."""
    from transformers import AutoModelForCausalLM

    from posttrain.checkpoint.tiny.model import _examples, measure_pass_rate
    from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
    from posttrain.rl.data.sort_digits import generate_prompts

    architecture = dataclasses.replace(
        TINY, num_hidden_layers=4, intermediate_size=128, n_routed_experts=8, routed_scaling_factor=1.0
    )
    folder = tmp_path / "model"
    command = [sys.executable, SCRIPTS / "make_tiny_model.py", *_arguments(folder, architecture, 4, seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, heldout = generate_prompts(4, 1, 512, seed=99)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rate = measure_pass_rate(model, _examples(make_tokenizer(256), heldout), torch.Generator().manual_seed(0))
    assert 0.15 <= rate <= 0.38
