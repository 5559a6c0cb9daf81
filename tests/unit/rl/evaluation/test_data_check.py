"""Data that must be refused before anything is trained, and data that must not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.reward_server import RewardServer, says

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer, stop_token_ids
from posttrain.plan.resolve import resolve
from posttrain.rl.evaluation.data_check import check_data, print_check
from posttrain.types import Prompt

CONFIG = Path(__file__).parents[4] / "config"
OWN = """
def by_source(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == f"<{ground_truth}>")

def generous(data_source, solution_str, ground_truth, extra_info):
    return float(len(ground_truth) > 0)

def by_length(prompts, completions, **columns):
    return [float(len(completion[0]["content"])) for completion in completions]

def fails(completions, **columns):
    raise RuntimeError("no network")
"""


def prompts(labels: list, first: str = "sort", source: str = "") -> list[Prompt]:
    return [Prompt(i, ({"role": "user", "content": f"{first} {i}"},), label, source) for i, label in enumerate(labels)]


NUMBERS = [str(100 + i) for i in range(40)]
HELDOUT = prompts(["1", "2"], "hold")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(256).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_token_ids()}))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


@pytest.fixture
def check(folder: Path):
    def check(train: list[Prompt], reward: str = "exact_match", more: str = "", heldout: list[Prompt] = HELDOUT):
        words = f"data.reward={reward} {more}"
        config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).config
        return check_data(config, folder, train, heldout)

    return check


def test_sound_data_pass_and_are_shown(check, capsys: pytest.CaptureFixture) -> None:
    found = check(prompts(NUMBERS))
    assert (found.problems, found.warnings) == ([], [])
    (labels,) = found.labels
    assert (labels.own, labels.other, labels.num_rows, labels.stated) == (1.0, 0.0, 40, "{label}")
    assert len(found.examples) == 10
    assert found.examples[0]["text"].endswith("<|assistant|>\n")
    assert found.lengths == (12, 13, 13)
    json.dumps(found.as_dict(), allow_nan=False)
    print_check(found)
    told = capsys.readouterr().out
    assert "exact_match gives full marks to 100.0% of 40 labels, 0.0% those of other rows" in told
    assert "no problems found" in told


def test_labels_that_no_grader_understands_are_refused_with_their_rows(check) -> None:
    found = check(prompts([{"answer": i} for i in range(30)] + NUMBERS[:10]), "math_answer")
    (problem,) = found.problems
    assert problem.key == "data.reward"
    assert """row 1: '{"answer": 0}' scores None: math_answer: error: ValueError: no label""" in problem.value
    assert "reward.min_own_label" in problem.allowed
    assert check(prompts(NUMBERS), "math_answer").problems == []


def test_a_grader_that_takes_any_label_is_refused(check, folder: Path) -> None:
    found = check(prompts(NUMBERS), f"{folder}/own.py:generous")
    (problem,) = found.problems
    assert problem.code == "other-label-accepted"
    assert "100.0%" in problem.value
    (warning,) = found.warnings
    assert warning.code == "reward-constant"


def test_the_form_in_which_a_label_is_stated_is_found(check, folder: Path) -> None:
    (labels,) = check(prompts(["1", "2"]), "math_answer").labels
    assert labels.stated == "{label}"
    found = check(prompts(NUMBERS), f"{folder}/own.py:by_source")
    assert "gives full marks to 0.0% of 40 labels" in found.problems[0].value


def test_graders_that_fail_end_the_check(check, folder: Path) -> None:
    (problem,) = check(prompts(NUMBERS), f"{folder}/own.py:fails").problems
    assert "error: RuntimeError: no network" in problem.value


def test_each_source_is_graded_by_its_own_reward(check, folder: Path) -> None:
    train = [*prompts(NUMBERS, source="sums"), *prompts(["a", "b"], "say", "words")]
    sources = (
        f"data.sources.sums.reward=math_answer data.sources.words.reward={folder}/own.py:by_source "
        "data.sources.sums.weight=2"
    )
    sums, words = check(train, more=sources).labels
    assert (sums.source, sums.grader, sums.own) == ("sums", "math_answer", 1.0)
    assert (words.source, words.grader, words.own) == ("words", "by_source", 0.0)


def test_held_out_prompts_that_are_trained_on_are_named(check) -> None:
    words = " ".join(f"w{i}" for i in range(20))
    train = [*prompts(NUMBERS), Prompt(40, ({"role": "user", "content": f"a {words}"},), "x")]
    found = check(train, heldout=[*HELDOUT, Prompt(2, ({"role": "user", "content": f"{words} b"},), "y")])
    (warning,) = found.warnings
    assert "1 of 3 evaluation prompts share 13 words in a row: 3 with 41" in warning.value


def test_prompts_over_the_limit_are_counted(check) -> None:
    limit = "rollout.max_prompt_tokens=12"
    refused = check(prompts(NUMBERS), more=limit)
    assert [problem.key for problem in refused.problems] == ["rollout.max_prompt_tokens"]
    found = check(prompts(NUMBERS), more=f"{limit} rollout.overlong_prompts=drop")
    assert found.problems == []
    (warning,) = found.warnings
    assert "30 of 40 prompts (75.0%) are longer; the longest has 13" in warning.value
    assert found.as_dict()["left_out"] == found.left_out == list(range(10, 40))
    (none,) = check(prompts(NUMBERS), more="rollout.max_prompt_tokens=2 rollout.overlong_prompts=drop").problems
    assert "none is left" in none.value


FAR = "reward.services.far"


def test_graders_that_need_no_label_show_what_they_say(check, folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "judge.txt").write_text("{response}")

    def verdict(question: str) -> str:
        return "Verdict: 9" if question == "100" else "Verdict: 1" if not question else "Verdict: 5"

    with RewardServer() as server, RewardServer(verdict=verdict) as other:
        judge = (
            f"reward.judges.wise.url={other.judge_url} reward.judges.wise.model=m reward.judges.wise.best_verdict=10 "
            f"reward.judges.wise.prompt_file={folder}/judge.txt"
        )
        reward = f"exact_match+0.1*far+-1*wise+length+{folder}/own.py:by_length"
        found = check(prompts(NUMBERS), reward, f"{FAR}.url={server.url} {judge}")
    assert (found.problems, found.warnings, len(found.labels)) == ([], [], 1)
    far, wise, length, own = found.verdicts
    assert (sum(len(body["answers"]) for body in server.asked), len(other.asked)) == (10, 10), "not for each row"
    assert (far.grader, far.num_tried, far.lowest["response"], far.failures) == ("far", 10, "", ())
    assert far.highest == {"prompt": "sort 0", "response": "the same again and " * 200, "score": 3800.0}
    assert (wise.highest["response"], wise.lowest, wise.num_scores) == (
        "100",
        {"prompt": "sort 0", "response": "", "score": 0.1},
        3,
    )
    tried = {answer["response"] for body in server.asked for answer in body["answers"]}
    assert {"100", "101", "\\boxed{100}", "", "sort 0"} < tried
    assert (length.num_scores > 1, own.grader, own.lowest["response"]) == (True, "by_length", "")
    json.dumps(found.as_dict(), allow_nan=False)
    print_check(found)
    told = capsys.readouterr().out
    assert "wise, of 10 responses that were tried:\n  highest score 0.9: '100'\n  lowest score 0.1: ''" in told


def test_a_grader_that_needs_no_label_is_shown_for_each_source(check) -> None:
    train = [*prompts([None] * 3, source="plain"), *prompts(["x"] * 3, source="named")]
    more = f"data.sources.plain.reward=far data.sources.named.reward=repetition {FAR}.url="
    with RewardServer() as server:
        found = check(train, more=more + server.url)
    assert [(one.source, one.grader, one.num_tried) for one in found.verdicts] == [
        ("plain", "far", 3),
        ("named", "repetition", 9),
    ]
    assert [answer["label"] for body in server.asked for answer in body["answers"]] == [None] * 3


def test_a_further_grader_that_fails_is_refused(check, folder: Path) -> None:
    (problem,) = check(prompts(NUMBERS), f"exact_match+0.5*{folder}/own.py:fails").problems
    assert "fails failed for 10 of 10 responses:\n        fails: error: RuntimeError: no network" in problem.value


@pytest.mark.parametrize(("share", "problems"), [(0.05, 1), (0.1, 0)])
def test_an_address_that_fails_is_refused_and_one_score_for_all_is_told(check, share: float, problems: int) -> None:
    with RewardServer([says("[NaN" + ", 1" * 9 + "]")]) as server:
        more = f"{FAR}.url={server.url} reward.max_failure_share={share}"
        found = check(prompts(NUMBERS), "far", more)
    assert len(found.problems) == problems
    for problem in found.problems:
        assert problem.key == "data.reward"
        assert "far failed for 1 of 10 responses:\n        far: error: expected a finite number" in problem.value
    (warning,) = found.warnings
    assert warning.value == "far gave one score to every response that was tried"
    assert found.verdicts[0].lowest is None
