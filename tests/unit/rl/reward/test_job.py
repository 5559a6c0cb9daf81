"""One call of a grader, without a process in between: its grades are checked, and what it raises gets a reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

import posttrain
from posttrain.config.reward_sum import MAX_NUMBER
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.job import Job, grade_job

NUMBERS = "a number between -8.5e+37 and 8.5e+37, which FP32 can hold"


def graded(grader: Callable, *texts: str, source: str = ""):
    """Return the outcome of a grader for some responses, or the reason why there is none."""
    found = grade_job(Job(grader, tuple(map(Answer, texts or ("a",))), source=source))
    return found.reason if isinstance(found, Failure) else found


def giving(score, **parts: float) -> Callable:
    return lambda answers: [Grade(score, parts) for _ in answers]


def raising(error: BaseException) -> Callable:
    def grader(answers):
        raise error

    return grader


def test_grades_are_plain_floats() -> None:
    assert graded(giving(1, length=True), "a", "b") == (Grade(1.0, {"length": 1.0}),) * 2
    assert graded(giving(None)) == (Grade(None),)
    (grade,) = graded(giving(True, length=True))
    assert (type(grade.score), type(grade.parts["length"])) == (float, float)


def test_there_is_a_grade_for_each_answer() -> None:
    assert graded(lambda answers: [], "a") == "ValueError: 0 grades for 1 answers"
    assert graded(lambda answers: [Grade(1.0)] * 2, "a") == "ValueError: 2 grades for 1 answers"


@pytest.mark.parametrize("score", [MAX_NUMBER, -MAX_NUMBER])
def test_a_score_is_usable(score: float) -> None:
    assert graded(giving(score)) == (Grade(score),)
    reason = (
        f"ValueError: a score of {score * 1.01:g} for the response 'a'; expected None or {NUMBERS}: scale or clip it"
    )
    assert graded(giving(score * 1.01)) == reason


def test_the_response_of_a_bad_score_is_shown_by_its_beginning() -> None:
    assert f"the response '{'x' * 80}';" in graded(giving(1e39), "x" * 80)
    assert f"the response '{'x' * 80}'...;" in graded(giving(1e39), "x" * 81)


def test_metrics_are_few_usable_and_have_short_names() -> None:
    many = {f"m{number}": 1.0 for number in range(101)}
    assert graded(giving(1.0, **dict(list(many.items())[:100])))[0].parts.keys() == {*list(many)[:100]}
    assert graded(giving(1.0, **many)) == (
        "ValueError: 101 metrics for one answer; at most 100 are kept: give fewer names"
    )
    assert len(graded(giving(1.0, **{"x" * 200: 1.0}))) == 1
    assert graded(giving(1.0, **{"x" * 201: 1.0})) == (
        "ValueError: a metric's name has 201 characters; at most 200 are kept"
    )
    assert graded(giving(1.0, x=1e39)) == f"ValueError: metric 'x' is 1e+39; expected {NUMBERS}: leave it out"


def test_a_reason_is_one_line_of_bounded_length() -> None:
    assert graded(raising(KeyError("gold"))) == "KeyError: 'gold'"
    assert graded(raising(ValueError("a\nb"))).count("\n") == 0
    assert graded(raising(ValueError("x" * 1000))) == f"ValueError: {'x' * 1000}"
    assert graded(raising(ValueError("x" * 1001))) == f"ValueError: {'x' * 1000}... (1001 characters)"
    assert graded(raising(type("E" * 100, (Exception,), {})("x"))) == f"{'E' * 80}: x"
    rude = type("Rude", (Exception,), {"__str__": lambda self: 1 / 0})
    assert graded(raising(rude())) == "Rude: it cannot be shown"


def test_a_lack_of_memory_is_no_fault_of_the_answer() -> None:
    with pytest.raises(MemoryError):
        graded(raising(MemoryError()))


def test_the_innermost_line_of_the_users_code_is_shown(tmp_path: Path) -> None:
    path, beside = tmp_path / "rewards.py", tmp_path / "site-packages" / "library.py"
    path.write_text("def fails(answers):\n    inner()\n\ndef inner():\n    import json\n    json.loads('{')\n")
    beside.parent.mkdir()
    beside.write_text("def fails(answers):\n    raise KeyError('a')\n")
    found: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), found)
    assert graded(found["fails"], source=str(path)).endswith(f" ({path}:6, in inner)")
    assert "rewards.py" not in graded(found["fails"])
    # What others have installed, or a text that was executed, is no line of the user's.
    exec(compile(beside.read_text(), str(beside), "exec"), found)
    assert graded(found["fails"], source=str(path)) == "KeyError: 'a'"
    exec("def fails(answers):\n    raise KeyError('a')\n", found)
    assert graded(found["fails"], source=str(path)) == "KeyError: 'a'"


def test_lines_of_the_library_are_none_of_the_users() -> None:
    library = Path(posttrain.__file__).parent
    beside, inside = library.parent / "rewards.py", library / "rewards.py"
    found: dict = {}
    exec(compile("def fails(answers):\n    raise KeyError('a')\n", str(inside), "exec"), found)
    exec(compile("def calls(answers):\n    fails(answers)\n", str(beside), "exec"), found)
    assert graded(found["calls"], source=str(beside)) == f"KeyError: 'a' ({beside}:2, in calls)"


def test_a_call_has_a_process_unless_it_says_otherwise() -> None:
    assert not Job(giving(1.0), ()).is_instant
