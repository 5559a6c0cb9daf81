import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.megatron_single import CONFIG_DIR

from posttrain.plan import rehearsal_record
from posttrain.plan.rehearsal_record import describe_rehearsal, digest, file_of, lengths_digest
from posttrain.plan.resolve import resolve
from posttrain.store import Paths


@pytest.fixture
def paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Paths(resolve({"site": "local", "model": "glm5_4layer"}, CONFIG_DIR))


def keep(paths, **content):
    file_of(paths).parent.mkdir(parents=True, exist_ok=True)
    whole = {"layers": 4, "of_layers": 4, "stages": [0], "of_stages": 1}
    assumed = {"lengths": "", "lengths_digest": "", "expert_imbalance": 1.5, **content.pop("assumed", {})}
    known = {"problems": [], **whole, "assumed": assumed}
    file_of(paths).write_text(json.dumps({"digest": digest(paths.resolved), **known, **content}))


def test_without_gpus_there_is_nothing_to_rehearse():
    assert (
        describe_rehearsal(Paths(resolve({"site": "local", "model": "tiny"}, CONFIG_DIR)))["state"]
        == "nothing to rehearse"
    )


def test_gpus_that_cannot_be_simulated_are_not_rehearsed():
    resolved = resolve({"site": "local", "model": "tiny", "hardware": "mi300x"}, CONFIG_DIR)
    assert describe_rehearsal(Paths(resolved))["state"] == "not to be rehearsed"


def test_another_version_of_megatron_is_not_rehearsed(paths, monkeypatch):
    keep(paths)
    monkeypatch.setattr(rehearsal_record, "version", lambda name: "0.0")
    assert describe_rehearsal(paths)["state"] == "rehearsed otherwise"


def test_what_ran_through_is_rehearsed(paths):
    assert describe_rehearsal(paths)["state"] == "not rehearsed"
    keep(paths)
    told = describe_rehearsal(paths)
    assert (told["state"], told["page"]) == ("rehearsed", file_of(paths).with_suffix(".html").name)
    assert "exactly this code and configuration: ran through" in told["words"]
    keep(paths, problems=[{}, {}])
    assert describe_rehearsal(paths)["state"] == "rehearsed: 2 problems found"


def test_a_quick_one_is_told(paths):
    keep(paths, stages=[0, 1, 3], of_stages=4)
    assert "configuration, with quick=1: ran through" in describe_rehearsal(paths)["words"]
    keep(paths, layers=8, of_layers=78)
    assert "configuration, with quick=1: ran through" in describe_rehearsal(paths)["words"]


def test_own_lengths_are_told(paths):
    file = Path("lengths.txt").absolute()
    file.write_text("4 8\n")
    keep(paths, assumed={"lengths": str(file), "lengths_digest": lengths_digest(str(file))})
    assert f"configuration, lengths of {file}: ran through" in describe_rehearsal(paths)["words"]
    file.write_text("4 9\n")
    assert describe_rehearsal(paths)["state"] == "rehearsed otherwise", "of other lengths"
    file.unlink()
    assert describe_rehearsal(paths)["state"] == "rehearsed otherwise", "nobody knows which"
    keep(paths, assumed={"expert_imbalance": 3.0})
    assert "configuration, expert_imbalance=3: ran through" in describe_rehearsal(paths)["words"]


def test_another_configuration_is_not_rehearsed(paths):
    keep(paths)
    optimizer = replace(paths.resolved.config.optimizer, lr=0.5)
    changed = replace(paths.resolved, config=replace(paths.resolved.config, optimizer=optimizer))
    file_of(Paths(changed)).parent.mkdir(parents=True, exist_ok=True)
    file_of(Paths(changed)).write_text(file_of(paths).read_text())
    assert describe_rehearsal(Paths(changed))["state"] == "rehearsed otherwise"


def test_other_code_is_not_rehearsed(paths, tmp_path, monkeypatch):
    keep(paths)
    (tmp_path / "posttrain").mkdir()
    (tmp_path / "posttrain" / "changed.py").write_text("pass\n")
    monkeypatch.setattr(rehearsal_record.posttrain, "__file__", str(tmp_path / "posttrain" / "__init__.py"))
    assert describe_rehearsal(paths)["state"] == "rehearsed otherwise"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"digest": "x"}', '{"digest": "x", "problems": 5}', "[" * 100_000]
)
def test_a_torn_file_is_no_rehearsal(paths, content):
    file_of(paths).parent.mkdir(parents=True, exist_ok=True)
    file_of(paths).write_text(content)
    told = describe_rehearsal(paths)
    assert told["state"] == "not rehearsed"
    assert "cannot be read" in told["words"]
