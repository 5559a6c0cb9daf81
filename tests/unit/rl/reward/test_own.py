"""Functions written for others, as they are; and what a plan reads of them without executing anything."""

import sys
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.config.own_reward import TRL, VERL, inspect_own
from posttrain.rl.reward.answer import Answer, Grade
from posttrain.rl.reward.own import OwnFunction

VERL_SOURCE = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info and extra_info.get("skip"):
        return None
    found = re.findall(r"\\d+", solution_str)
    right = bool(found) and found[-1] == ground_truth
    return {"score": float(right), "numbers": len(found), "source": data_source}
"""
TRL_SOURCE = """
async def nothing(completions, **kwargs):
    return [None for _ in completions]

def shares(prompts, completions, answer, log_metric=None, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    log_metric("longest", max(map(len, texts)))
    return [texts.count(text) / len(texts) + (text == right) for text, right in zip(texts, answer, strict=True)]

def plain(prompts, completions, answer):
    return [float(prompt + completion == right) for prompt, completion, right in zip(prompts, completions, answer)]
"""


@pytest.fixture
def source(tmp_path: Path):
    def write(text: str, name: str = "rewards.py") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def _answers(*texts: str, is_chat: bool = True, **columns) -> tuple[Answer, ...]:
    prompt = ({"role": "user", "content": "2 + 2 = "},)
    return tuple(Answer(text, "4", prompt, "sums", columns, is_chat=is_chat) for text in texts)


def test_function_of_verl(source) -> None:
    own = OwnFunction(inspect_own(f"{source(VERL_SOURCE)}:compute_score"))
    assert (own.own.signature, own.takes_groups) == (VERL, False)
    assert own(_answers("is it 5 or 4", "no")) == (Grade(1.0, {"numbers": 2.0}), Grade(0.0, {"numbers": 0.0}))
    assert own(_answers("4", extra_info={"skip": True}))[0].score is None


def test_functions_of_trl(source) -> None:
    path = source(TRL_SOURCE)
    own = OwnFunction(inspect_own(f"{path}:shares"))
    assert (own.own.signature, own.takes_groups) == (TRL, True)
    grades = own(_answers("4", "4", "five", answer="4"))
    assert [grade.score for grade in grades] == pytest.approx([5 / 3, 5 / 3, 1 / 3])
    assert grades[0].parts == {"longest": 4.0}
    assert OwnFunction(inspect_own(f"{path}:nothing"))(_answers("4"))[0].score is None
    plain = OwnFunction(inspect_own(f"{path}:plain"))
    assert plain(_answers("4", is_chat=False, answer="2 + 2 = 4"))[0].score == 1.0


def test_what_the_trainer_asks_about_a_function(source) -> None:
    path = source(VERL_SOURCE)
    own = OwnFunction(inspect_own(f"{path}:compute_score"))
    assert (own.source, own.needs_label, own.is_instant) == (path, True, False)
    unlabelled = source("def f(prompts, completions, **columns): return [1 for _ in completions]", "other.py")
    assert not OwnFunction(inspect_own(f"{unlabelled}:f")).needs_label


def test_the_source_of_the_data_is_handed_over(source) -> None:
    path = source("def f(data_source, solution_str, ground_truth, extra_info): return data_source == solution_str")
    own = OwnFunction(inspect_own(f"{path}:f"))
    assert own(_answers("sums"))[0].score == 1.0
    assert own(_answers("mine", data_source="mine"))[0].score == 1.0


def test_columns_reach_a_function_that_takes_any(source) -> None:
    path = source("def f(completions, **columns): return [float(level) for level in columns['level']]")
    assert OwnFunction(inspect_own(f"{path}:f"))(_answers("4", level=3))[0].score == 3.0


def test_the_module_of_a_function_is_one_as_any(source) -> None:
    """Its file is known, and what it defines is found by name."""
    path = source(
        "import pickle\nclass Answer: pass\n"
        "def f(completions): return [float(len(pickle.dumps(Answer())) > 0 and __file__.endswith('rewards.py'))]"
    )
    assert OwnFunction(inspect_own(f"{path}:f"))(_answers("4"))[0].score == 1.0


def test_a_plan_executes_nothing(source, tmp_path: Path) -> None:
    path = source(f"open({str(tmp_path / 'ran')!r}, 'w')\n{VERL_SOURCE}")
    own = OwnFunction(inspect_own(f"{path}:compute_score"))
    assert not (tmp_path / "ran").exists()
    own(_answers("4"))
    assert (tmp_path / "ran").exists()


def test_source_and_the_files_that_it_names_are_its_identity(source, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a")
    text = f'REWARD_FILES = ["words.txt"]\n{VERL_SOURCE}'
    before = inspect_own(f"{source(text)}:compute_score", "data.reward")
    (tmp_path / "words.txt").write_text("b")
    after = inspect_own(f"{source(text)}:compute_score", "data.reward")
    assert before.digest != after.digest
    assert inspect_own(f"{source(text + '# another comment')}:compute_score", "data.reward").digest != after.digest
    with pytest.raises(RuntimeError, match="has changed since the run was planned"):
        OwnFunction(before)(_answers("4"))


def test_a_file_beside_it_can_be_imported(source) -> None:
    source("RIGHT = '4'", "beside_the_reward.py")
    path = source("from beside_the_reward import RIGHT\ndef f(completions, **_):\n    return [RIGHT == '4']")
    assert OwnFunction(inspect_own(f"{path}:f"))(_answers("4"))[0].score == 1.0
    # It comes before an installed module of the same name.
    assert sys.path[0] == str(Path(path).parent)


@pytest.mark.parametrize(
    ("text", "name", "code", "datum"),
    [
        (VERL_SOURCE, "compute_scores", "no-such-function", "compute_score"),
        ("def f(:", "f", "reward-unreadable", "line 1"),
        ("def f(response, label): ...", "f", "reward-signature", "response, label"),
        ("def f(completions, trainer_state): ...", "f", "reward-needs-trainer", "trainer_state"),
        ("class A:\n    def f(self, completions): ...", "f", "no-such-function", "none"),
        ("REWARD_FILES = list('a')\ndef f(completions): ...", "f", "names-not-literal", "line 1"),
        ("REWARD_FILES = ['is_not_there']\ndef f(completions): ...", "f", "no-such-file", "is_not_there"),
    ],
)
def test_what_is_no_reward_function_is_refused(source, text: str, name: str, code: str, datum: str) -> None:
    with rejected(code, datum, key="data.reward"):
        inspect_own(f"{source(text)}:{name}", "data.reward")


@pytest.mark.parametrize("text", ["nowhere.py:f", "nowhere.py", ":f"])
def test_no_file(text: str) -> None:
    with rejected("reward-unreadable", "path.py:function", key="data.reward"):
        inspect_own(text, "data.reward")


@pytest.mark.parametrize("returned", ["'1'", "{'points': 1}", "[1]", "object()"])
def test_what_is_no_score_is_an_error(source, returned: str) -> None:
    path = source(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {returned}")
    with pytest.raises(TypeError, match=r"without 'score': points$" if "points" in returned else "as a score"):
        OwnFunction(inspect_own(f"{path}:compute_score"))(_answers("4"))


@pytest.mark.parametrize("returned", ["float('nan')", "-float('inf')", "1e39", "10**400", "1e38", "{'score': 1e39}"])
def test_a_score_that_fp32_does_not_hold_is_an_error(source, returned: str) -> None:
    path = source(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {returned}")
    own = OwnFunction(inspect_own(f"{path}:compute_score"))
    with pytest.raises(
        ValueError, match=rf"compute_score \({path}:1\) .*score of .* for the response 'four'.*scale or clip"
    ):
        own(_answers("four"))
    trl = source(f"def f(completions):\n    return [1.0, {returned}]")
    with pytest.raises((ValueError, TypeError), match=r"f \(.*rewards.py:1\)"):
        OwnFunction(inspect_own(f"{trl}:f"))(_answers("4", "5"))


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ("{'x': float('nan')}", "metric 'x' is nan"),
        ("{'x': 1e39}", r"metric 'x' is 1e\+39"),
        ("{str(n): n for n in range(200_000)}", "200000 metrics for one answer; at most 100"),
        ("{'x' * 10_000: 1}", "a metric's name has 10000 characters"),
    ],
)
def test_metrics_are_numbers_and_few(source, metrics: str, reason: str) -> None:
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info):"
    verl = f"{head}\n    return {{'score': 1, **{metrics}}}"
    with pytest.raises(ValueError, match=reason):
        OwnFunction(inspect_own(f"{source(verl)}:compute_score"))(_answers("4"))


@pytest.mark.parametrize(
    ("logs", "reason"),
    [("log_metric('x', float('nan'))", "metric 'x' is nan"), ("[log_metric(n, n) for n in range(200)]", "101 metrics")],
)
def test_logged_metrics_are_numbers_and_few(source, logs: str, reason: str) -> None:
    path = source(f"def f(completions, log_metric):\n    {logs}\n    return [1.0]")
    with pytest.raises(ValueError, match=reason):
        OwnFunction(inspect_own(f"{path}:f"))(_answers("4"))


def test_a_reward_for_each_completion(source) -> None:
    path = source("def f(completions):\n    return [1.0]")
    with pytest.raises(TypeError, match="1 rewards for 2 completions"):
        OwnFunction(inspect_own(f"{path}:f"))(_answers("4", "5"))


@pytest.mark.parametrize(
    ("code", "needs_label"),
    [
        ("def f(data_source, solution_str, ground_truth, extra_info): return len(solution_str)", False),
        ("def f(data_source, solution_str, ground_truth, extra_info): return ground_truth == 1", True),
        ("def f(data_source, solution_str, ground_truth, extra_info): return len(extra_info)", True),
        ("def f(solution_str, ground_truth): return g(**locals())", True),
        ("def f(solution_str, ground_truth, **rest): return len(rest)", True),
        ("def f(prompts, completions, **columns): return [1 for _ in completions]", False),
        ("def f(completions, log_metric): return [1 for _ in completions]", False),
        ("def f(completions, **columns): return columns['answer']", True),
        ("def f(completions, answer): return [1 for _ in completions]", True),
        ("import functools\n@functools.cache\ndef f(completions): return []", True),
    ],
)
def test_a_function_that_no_label_reaches_is_known_by_its_source(source, code, needs_label):
    assert inspect_own(f"{source(code)}:f").needs_label is needs_label
