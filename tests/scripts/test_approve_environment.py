import json
from pathlib import Path

import pytest
from tests.scripts.test_approve_data import check_kills, words_of
from tests.support.fault_record import FaultRecord
from tests.support.forked_programs import run_step
from tests.support.rejections import assert_rejected

from posttrain.store import read_receipt, receipt_of, require_files

SOURCE = """
class Right:
    def __init__(self, seed): ...
    def reset(self, row):
        self.label = row["label"]
        return row["messages"], None
    def step(self, action):
        self.is_right = action["content"] == self.label
        return [], True
    def reward(self, trajectory): return float(self.is_right)

class Generous(Right):
    def reward(self, trajectory): return 1.0
"""


def words_with(folder: Path, name: str):
    (folder / "mine.py").write_text(SOURCE)
    words, output = words_of(folder, f"data.environment={folder}/mine.py:{name} data.reward=environment")
    output = output.with_name("environment_check.json")
    return [*words[:-1], output], output


def approve(folder: Path, name: str):
    words, output = words_with(folder, name)
    return run_step("approve_environment", words), output


def test_an_approved_environment_is_written_with_a_receipt(tmp_path):
    ended, output = approve(tmp_path, "Right")
    assert ended.returncode == 0, ended.stderr
    assert require_files(output.parent, receipt_of(output), content=True)
    found = json.loads(output.read_text())
    assert found["problems"] == []
    assert found["agents"][0] == {"agent": "says nothing", "rewards": [0.0] * 8, "failures": [], "num_paid": 0}
    assert read_receipt(receipt_of(output)).settings["environment"] == f"{tmp_path}/mine.py:Right"
    assert "an agent that says nothing earned 0, 0" in ended.stdout


def test_a_refused_environment_leaves_nothing(tmp_path):
    ended, output = approve(tmp_path, "Generous")
    assert ended.returncode == 1
    assert_rejected(ended.stderr, "environment-pays-cheats", "says nothing in 8 of 8 rows", key="data.environment")
    assert not output.exists()
    assert not receipt_of(output).exists()


@pytest.mark.timeout(1800)
@pytest.mark.faults("kills")
def test_killed_anywhere_it_has_approved_all_or_nothing(tmp_path, faults: FaultRecord):
    words, output = words_with(tmp_path, "Right")
    check_kills("approve_environment", words, output, 10, faults)
