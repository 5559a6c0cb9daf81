"""Judges behind a server that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.reward_server import RewardServer, says

from posttrain.config.services import Judge
from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.judge import JudgeGrader
from posttrain.rl.reward.scoring import Scored, Scorer

CONFIG = Path(__file__).parents[4] / "config"
PROMPT = "Q: {prompt}\nA: {response}\nLevel {level}, wanted {label}. {{So}} \\boxed{}? End with 'Verdict: yes' or no."
ONE = ({"role": "user", "content": "2+2?"},)


def ask(server: RewardServer, *answers: Answer, prompt: str = PROMPT, **settings: object) -> list[Grade | Failure]:
    judge = Judge(**{"url": server.judge_url, "model": "m", "deadline_seconds": 20.0, **settings})
    return asyncio.run(JudgeGrader("reward.judges.wise", judge, prompt).grade_all(answers))


def judged(said: str, **settings: object) -> Grade | Failure:
    with RewardServer(verdict=lambda question: said) as server:
        (outcome,) = ask(server, Answer("4"), prompt="{response}", **settings)
    return outcome


def test_what_is_asked() -> None:
    several = ({"role": "system", "content": "Count."}, *ONE, {"role": "assistant", "content": None, "tool_calls": []})
    with RewardServer() as server:
        rows = [Answer("{label} {prompt}", {"x": 4}, messages, "", {"level": 3}) for messages in (ONE, several)]
        assert ask(server, *rows, max_requests=1, max_tokens=7) == [Grade(1.0)] * 2
    end = "Level 3, wanted {\"x\": 4}. {So} \\boxed{}? End with 'Verdict: yes' or no."
    assert server.asked[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": f"Q: 2+2?\nA: {{label}} {{prompt}}\n{end}"}],
        "temperature": 0,
        "max_tokens": 7,
    }
    asked = server.asked[1]["messages"][0]["content"]
    assert asked.startswith("Q: system: Count.\nuser: 2+2?\nassistant: \nA: ")


def test_verdicts_go_to_the_answers_that_they_are_about() -> None:
    def verdict(question: str) -> str:
        return f"verdict: {int(question) % 10}"

    with RewardServer(verdict=verdict) as server:
        outcomes = ask(server, *(Answer(str(n)) for n in range(30)), prompt="{response}", best_verdict=10.0)
    assert outcomes == [Grade(n % 10 / 10) for n in range(30)]
    assert server.most_at_once <= 8


@pytest.mark.parametrize(
    ("said", "settings", "score"),
    [
        ("Verdict: yes", {}, 1.0),
        ("Hm.\n\n**Verdict:** No", {}, 0.0),
        ("Verdict: no... wait.\nVerdict: YES", {}, 1.0),
        ("verdict 0.25", {}, 0.25),
        ("Verdict: 8/10", {"best_verdict": 10.0}, 0.8),
        ("Verdict: 0", {"best_verdict": 10.0}, 0.0),
        ("[[7]]", {"best_verdict": 10.0, "verdict_pattern": r"\[\[(\d+)\]\]"}, 0.7),
        ("x " * 25_000 + "Verdict: yes", {}, 1.0),
        ("Verdict: yes" + "." * 9_988, {}, 1.0),
    ],
)
def test_a_verdict_is_a_score(said: str, settings: dict[str, object], score: float) -> None:
    assert judged(said, **settings) == Grade(score)


@pytest.mark.parametrize(
    ("said", "settings", "reason"),
    [
        ("Yes, it is right.", {}, "the judge gave no verdict: Yes, it is right."),
        ("", {}, "the judge gave no verdict: "),
        ("Verdict: yes" + " and more" * 2000, {}, "the judge gave no verdict: Verdict: yes and more"),
        ("Verdict: yes" + "." * 9_989, {}, "the judge gave no verdict: Verdict: yes..."),
        ("Verdict: yes. My verdict: perhaps", {}, "expected a verdict from 0 to 1, yes or no, came perhaps"),
        ("Verdict: 11", {"best_verdict": 10.0}, "expected a verdict from 0 to 10, yes or no, came 11"),
        ("Verdict: -1", {"best_verdict": 10.0}, "came -1"),
        ("Verdict: nan", {}, "came nan"),
        ("ab", {"verdict_pattern": "a(x)?b"}, "came None"),
    ],
)
def test_what_is_no_verdict_is_a_failure_and_no_score(said: str, settings: dict[str, object], reason: str) -> None:
    outcome = judged(said, **settings)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "error"
    assert reason in outcome.reason


@pytest.mark.parametrize(
    "reply",
    [
        *("[]", "1", '{"choices": []}', '{"choices": [1]}', '{"choices": [{"message": {"content": null}}]}'),
        '{"choices": [{"message": "Verdict: yes"}]}',
        '{"choices": [{"message": {"content": "Verdict: yes"}, "finish_reason": "length"}]}',
    ],
)
def test_what_is_no_finished_chat_completion_is_a_failure(reply: str) -> None:
    with RewardServer([says(reply)]) as server:
        (outcome,) = ask(server, Answer("4"), prompt="{response}")
    assert isinstance(outcome, Failure)
    assert outcome.reason.startswith(("expected a chat completion", "the judge was cut after 1024 tokens"))


def test_an_answer_without_a_label_is_not_judged_by_one() -> None:
    with RewardServer() as server:
        with_label = ask(server, Answer("4"), Answer("5", "x"), prompt="{response} {label}")
        assert (with_label, len(server.asked)) == ([Grade(None), Grade(1.0)], 1)
        assert ask(server, Answer("4"), prompt="{response}") == [Grade(1.0)]
        (outcome,) = ask(server, Answer("4"), prompt="{response} {level}")
    assert outcome == Failure("error", "the judge's prompt: 'level' is missing (did you mean label?)")
    assert len(server.asked) == 2


@pytest.fixture
def resolved(tmp_path: Path) -> Callable:
    (tmp_path / "judge.txt").write_text("{response}")

    def resolved(more: str = "", reward: str = "exact_match+0.5*wise", url: str = "http://127.0.0.1:9/v1"):
        keys = {"url": url, "model": "m", "prompt_file": tmp_path / "judge.txt"}
        words = " ".join(f"reward.judges.wise.{key}={value}" for key, value in keys.items())
        return resolve({"model": "tiny", "site": "local", "set": f"data.reward={reward} {words} {more}"}, CONFIG)

    return resolved


def test_a_judge_is_a_term_of_the_reward_like_any_other(resolved: Callable) -> None:
    verdict = {"b": "Verdict: no", "c": "Verdict: yes"}.__getitem__
    with RewardServer(verdict=verdict) as server, GraderPool(num_workers=1) as pool:
        scorer = Scorer(resolved(url=server.judge_url).config, pool)
        (scored,) = asyncio.run(scorer.score([[Answer("b", "b"), Answer("c", "b")]]))
    assert scored == [
        Scored(1.0, {"exact_match": 1.0, "wise": 0.0}, {}),
        Scored(0.5, {"exact_match": 0.0, "wise": 1.0}, {}),
    ]


def test_what_a_judge_is_asked_is_part_of_the_runs_identity_and_where_is_not(
    resolved: Callable, tmp_path: Path
) -> None:
    first = resolved()
    assert "url" not in json.dumps(first.experiment)
    same = ["url=https://other/v1", "deadline_seconds=1", "max_requests=2", "num_retries=0", "token_variable=X"]
    assert {resolved(f"reward.judges.wise.{word}").run for word in same} == {first.run}
    others = ["model=n", "best_verdict=10", "max_tokens=9", r"verdict_pattern=(\\d)"]
    names = {first.run, *(resolved(f"reward.judges.wise.{word}").run for word in others)}
    (tmp_path / "judge.txt").write_text("{response}!")
    assert len({*names, resolved().run}) == 6


def test_where_a_service_is_does_not_name_the_run(resolved: Callable) -> None:
    names = {resolved(f"reward.services.far.url=http://{host}/score").run for host in ("one", "two")}
    assert names == {resolved().run}
    assert resolved(reward="wise").run not in names


def test_a_prompt_that_changed_after_planning_is_not_asked(resolved: Callable, tmp_path: Path) -> None:
    config = resolved().config
    (tmp_path / "judge.txt").write_text("{response}!")
    with GraderPool() as pool, pytest.raises(RuntimeError, match=r"judge\.txt has changed since the run was planned"):
        Scorer(config, pool)


@pytest.mark.parametrize("content", [None, b"\xff", b"no place"])
def test_a_prompt_that_is_none_is_refused_when_planning(resolved: Callable, tmp_path: Path, content) -> None:
    (tmp_path / "judge.txt").unlink()
    if content is not None:
        (tmp_path / "judge.txt").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        resolved()
    assert [problem.key for problem in refused.value.problems] == ["reward.judges.wise.prompt_file"]
    assert resolved(reward="exact_match").config.reward.own_digests == []
