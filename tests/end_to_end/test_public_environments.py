"""Unmodified public environments, in servers of their own, through our clients: the actions are scripted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.support.public_environments import ENVIRONMENTS, act, nemo_gym, openenv, play, row_of
from tests.support.requirements import require
from tests.support.workflow_runs import ROOT

from posttrain.rl.environments.protocol import EnvironmentFailure

pytestmark = pytest.mark.faults("environments")
QUESTION = "<context>Aspirin thins the blood.</context>\n<question>What does aspirin do?</question>"
DIPG_ROW = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Aspirin thins the blood."}]


def test_sessions_of_nemo_gym():
    row = row_of("example_session_state_mgmt")
    add = [("increment_counter", {"count": count}) for count in (1, 2)]
    with nemo_gym("example_session_state_mgmt", "StatefulCounterResourcesServer") as url:
        right = play(f"nemo_gym+{url}", row, act(*add), act(("get_counter_value", {})), act(text="6"))
        assert right == (['{"success":true}'] * 2 + ['{"count":6}'], 1.0)
        read, reward = play(f"nemo_gym+{url}", row, act(("verify", {})), act(("increment_counter", {})), act(text="6"))
        assert read[0] == "error: there is no function 'verify'"
        assert "Field required" in read[1]
        assert reward == 0.0


def test_several_turns_of_nemo_gym():
    row = row_of("example_multi_step")
    asks = [act(("get_synonym_value", {"synonym": word})) for word in row["expected_synonyms"]]
    said = act(("extract_synonym_values", {"synonym_values": row["expected_synonym_values"]}))
    with nemo_gym("example_multi_step", "ExampleMultiStepResourcesServer") as url:
        read, reward = play(f"nemo_gym+{url}", row, *asks, said, act(text="done"))
        assert [json.loads(text)["synonym_value"] for text in read[:-1]] == row["expected_synonym_values"]
        assert reward == 1.0
        assert play(f"nemo_gym+{url}", row, act(text="done")) == ([], 0.0)


def test_the_workplace_assistant_of_nemo_gym():
    row = row_of("workplace_assistant")
    calls = [(call["name"], json.loads(call["arguments"])) for call in row["ground_truth"]]
    with nemo_gym("workplace_assistant", "WorkbenchResourcesServer") as url:
        assert play(f"nemo_gym+{url}", row, act(*calls), act(text="done"))[1] == 1.0
        assert play(f"nemo_gym+{url}", row, act(text="done"))[1] == 0.0


def test_questions_of_nemo_gym_have_one_turn():
    row = row_of("mcqa")
    with nemo_gym("mcqa", "MCQAResourcesServer") as url:
        rewards = [play(f"nemo_gym+{url}", row, act(text=f"\\boxed{{{letter}}}"))[1] for letter in "BC"]
    assert rewards == [1.0, 0.0]


def test_the_environment_that_openenv_writes(tmp_path: Path):
    openenv_program = ENVIRONMENTS / "openenv/bin/openenv"
    require("environments", "" if openenv_program.exists() else f"{openenv_program} is not there")
    subprocess.run([openenv_program, "init", "echo_env", "-o", tmp_path], check=True, capture_output=True)
    with openenv("server.app:app", tmp_path / "echo_env") as url:
        actions = [act(("act", {"message": "hello"})), act(("act", {"words": 1})), act(text="bye")]
        read, reward = play(f"openenv+{url}", {}, *actions)
    assert json.loads(read[0])["echoed_message"] == "hello"
    assert read[1].startswith("error: ")
    assert "Field required" in read[1]
    assert reward == 0.5


def test_a_published_environment_of_openenv(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": DIPG_ROW}) + "\n")
    variables = {"DIPG_DATASET_PATH": str(tmp_path / "rows.jsonl"), "DATABASE_URL": f"sqlite:///{tmp_path}/x.db"}
    with openenv("med_safety_gym.app:app", tmp_path, **variables) as url:
        read, reward = play(f"openenv+{url}", {}, act(("act", {"llm_response": "{}"})))
        refused, _ = play(f"openenv+{url}", {}, act(("act", {})), act(text=""))
    assert {"safe", "format_error"} <= json.loads(read[0])["metrics"].keys()
    assert reward < 0
    assert "Field required" in refused[0]


def test_one_on_the_base_classes_of_openenv():
    with openenv("openenv_guess:app", ROOT / "tests/support") as url:
        right = play(f"openenv+{url}", {"highest": 8}, *(act(("act", {"digit": digit})) for digit in (2, 3)))
        assert [json.loads(text)["hint"] for text in right[0]] == ["higher", "right"]
        assert right[1] == 1.0
        wrong = play(f"openenv+{url}", {}, *(act(("act", {"digit": digit})) for digit in (0, 1, 2, 4)))
        assert wrong[1] == 0.0
        with pytest.raises(EnvironmentFailure, match="error: step: EXECUTION_ERROR"):
            play(f"openenv+{url}", {}, act(("act", {"digit": 66})))
