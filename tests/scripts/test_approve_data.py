import json
import time

import pytest
from tests.support.evaluation_inputs import make_inputs
from tests.support.fault_record import FaultRecord
from tests.support.forked_programs import run_step
from tests.support.killing import run_killed
from tests.support.rejections import assert_rejected

from posttrain.rl.data.sort_digits import generate_prompts
from posttrain.store import read_json, receipt_of, record_files, require_files, write_receipt
from posttrain.store.receipts import Receipt


def words_of(folder, overrides):
    arguments = make_inputs(folder, overrides)
    dataset = folder / "dataset"
    train, _ = generate_prompts(4, 50, 1, seed=0)
    (dataset / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    write_receipt(receipt_of(dataset), Receipt("download_dataset", record_files(dataset), {}, {}))
    place = arguments.index("--checkpoint-receipt")
    del arguments[place : place + 2]
    output = folder / "run" / "data_check.json"
    return [*arguments, "--dataset-receipt", receipt_of(dataset), "--output", output], output


def approve(folder, overrides):
    arguments, output = words_of(folder, overrides)
    return run_step("approve_data", arguments), output


def test_what_is_approved_is_written_with_a_receipt(tmp_path):
    ended, output = approve(tmp_path, "")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(output.read_text())
    assert found["labels"][0]["own"] == 1.0
    assert len(found["examples"]) == 10
    assert receipt_of(output).exists()


def test_what_is_refused_leaves_nothing(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def f(completions, **_):\n    return [0.0 for _ in completions]\n")
    ended, output = approve(tmp_path, f"data.reward={own}:f")
    assert ended.returncode == 1
    assert_rejected(ended.stderr, "label-not-accepted", "0.0% of 50")
    assert not output.exists()
    assert not receipt_of(output).exists()


def test_a_reward_that_exits_is_an_error_with_its_place(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("import sys\ndef f(completions, **_):\n    sys.exit(0)\n")
    ended, output = approve(tmp_path, f"data.reward={own}:f")
    assert ended.returncode == 1
    assert f"SystemExit: 0 ({own}:3, in f)" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not output.exists()


def check_kills(step, words, output, num_kills, faults: FaultRecord):
    """Kill a step over and over: the first time nothing is there, then another result with its receipt."""
    claim, started, kills = (output.parent, receipt_of(output)), time.monotonic(), 0
    while kills < num_kills:
        if kills:
            output.write_text("{}\n")
            write_receipt(claim[1], Receipt(step, record_files(output.parent, [output.name]), {}, {}))
        endings = run_killed(step, words, output.parent, None, claim=claim, timeout=900)
        assert endings[-1] == 0
        assert len(endings) > 3
        assert require_files(*claim, content=True)
        assert read_json(output) != {}
        kills += len(endings) - 1
    faults.add_counts("kills", {step: kills}, time.monotonic() - started)
    faults.equal = True


@pytest.mark.timeout(1800)
@pytest.mark.faults("kills")
def test_killed_anywhere_it_has_approved_all_or_nothing(tmp_path, faults: FaultRecord):
    words, output = words_of(tmp_path, "")
    check_kills("approve_data", words, output, 30, faults)
