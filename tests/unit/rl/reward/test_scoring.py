"""From `data.reward` to rewards: sums, groups, sources, failures."""

import asyncio
import re
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scored, Scorer, check_failures

CONFIG = Path(__file__).parents[4] / "config"
OWN = """
def rank(prompts, completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [None if text == "?" else float(sorted(set(texts)).index(text)) for text in texts]

def fails(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "no":
        raise RuntimeError("cannot")
    return {"score": 0.5, "length": len(solution_str)}

def large(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str) if solution_str[0] == "1" else 0.0
"""


@pytest.fixture(scope="module")
def pool():
    with GraderPool(num_workers=1) as pool:
        yield pool


@pytest.fixture
def score(tmp_path: Path, pool: GraderPool):
    (tmp_path / "own.py").write_text(OWN)

    def score(reward: str, *groups: list[Answer], more: str = "") -> list[list[Scored]]:
        words = f"data.reward={reward.replace('OWN', str(tmp_path / 'own.py'))} {more}"
        config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).config
        return asyncio.run(Scorer(config, pool).score(groups))

    return score


def answers(*texts: str, label: str = "b", source: str = "") -> list[Answer]:
    return [Answer(text, label, ({"role": "user", "content": "?"},), source) for text in texts]


def test_scores_are_weighted_and_added(score) -> None:
    ((first, second),) = score("exact_match+0.25*OWN:fails", answers("b", "ccc"))
    assert (first.reward, second.reward) == (1.125, 0.125)
    assert second.scores == {"exact_match": 0.0, "fails": 0.5}
    assert second.parts == {"fails/length": 3.0}


def test_a_function_of_groups_sees_each_group_alone(score) -> None:
    found = score("OWN:rank", answers("b", "a", "c"), answers("z", "?"))
    assert [[one.reward for one in group] for group in found] == [[1.0, 0.0, 2.0], [1.0, None]]
    assert [one.failure for one in found[1]] == ["", ""]


def test_a_failure_takes_the_reward_and_no_other_score(score) -> None:
    ((good, bad),) = score("exact_match+OWN:fails", answers("b", "no"))
    assert good.reward == 1.5
    assert (bad.reward, bad.scores, bad.parts) == (None, {"exact_match": 0.0, "fails": None}, {})
    assert re.fullmatch(r"fails: error: RuntimeError: cannot \(.*own.py:8, in fails\)", bad.failure)


def test_a_sum_that_overflows_names_its_grader_and_the_remedy(score) -> None:
    ((good, bad),) = score("exact_match+1e300*OWN:large", answers("b", "1e30"))
    assert good.reward == 1.0
    assert (bad.reward, bad.scores) == (None, {"exact_match": 0.0, "large": 1e30})
    assert bad.failure.startswith(
        "data.reward: error: 1e+300*large is inf with a score of 1e+30, beyond 8.5e+37: lower"
    )


def test_each_source_has_its_own_reward(score) -> None:
    more = "data.sources.x.reward=exact_match data.sources.y.reward=length reward.target_tokens=1"
    (x,), (y,) = score("exact_match", answers("b", source="x"), answers("b", source="y"), more=more)
    assert (x.scores, y.scores) == ({"exact_match": 1.0}, {"length": 0.0})


def test_a_function_that_changed_after_planning_is_not_asked(tmp_path: Path, pool: GraderPool) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = f"data.reward={tmp_path}/own.py:rank"
    config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).config
    (tmp_path / "own.py").write_text(OWN + "# changed\n")
    with pytest.raises(RuntimeError, match="has changed since the run was planned"):
        Scorer(config, pool)


def test_a_function_is_part_of_the_runs_identity(tmp_path: Path) -> None:
    names = set()
    for comment in ("", "# changed\n"):
        (tmp_path / "own.py").write_text(OWN + comment)
        words = f"data.reward={tmp_path}/own.py:rank"
        names.add(resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).run)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("data.reward=maths", "data.reward"),
        ("data.reward=math+formt", "data.reward"),
        ("data.reward=nowhere.py:f", "data.reward"),
        ("data.reward=math+math", "data.reward"),
        ("data.sources.x.reward=nowhere.py:f", "data.sources.x.reward"),
    ],
)
def test_a_reward_that_is_none_is_refused_when_planning(words: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve({"model": "tiny", "site": "local", "set": words}, CONFIG)
    assert {problem.key for problem in refused.value.problems} == {key}


def test_a_format_that_takes_exponential_time_is_refused(score) -> None:
    with rejected("not-a-pattern", key="reward.format_pattern"):
        score("format", answers("a"), more="reward.format_pattern=(a+)+b")


def test_labels_are_held_against_graders_that_need_them_and_cost_no_request(pool: GraderPool) -> None:
    words = "data.reward=exact_match+length+far reward.services.far.url=http://127.0.0.1:9/score"
    config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG).config
    scorer = Scorer(config, pool)
    assert [scorer.needs_label(term) for term in scorer.terms[""]] == [True, False, False]


def test_how_many_may_fail() -> None:
    check_failures(["", "math: deadline: late"], 0.5)
    with pytest.raises(RuntimeError, match=r"failed for 1 of 2 responses(?s:.*)math: deadline: late"):
        check_failures(["", "math: deadline: late"], 0.49)
    check_failures([""] * 3, 0.0)
