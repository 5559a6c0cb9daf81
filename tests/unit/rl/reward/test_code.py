"""The grader `code` in real sandboxes: right and wrong programs in every shape of tests, and programs that cheat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.plan.resolve import resolve
from posttrain.rl.reward.answer import Answer, Failure, Grade
from posttrain.rl.reward.assert_tests import split_asserts
from posttrain.rl.reward.code import CodeGrader, last_block, same_output, same_value
from posttrain.rl.reward.code_tests import CallTest, read_tests
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.scoring import Scorer
from posttrain.sandbox.program import Limits, Program, Result, SandboxUnavailable
from posttrain.sandbox.run import run

CONFIG_DIR = Path(__file__).parents[4] / "config"
GRADER = CodeGrader(run, Limits(seconds=10), 2)
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ROWS = [{"input": "1 2\n", "output": "3", "testtype": "stdin"}, {"input": "3 4", "output": "7\n", "testtype": "stdin"}]
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}
FUNCTIONAL = [
    {"input": f"{one}\n{two}", "output": str(one + two), "testtype": "functional", "metadata": {"func_name": "add"}}
    for one, two in ((1, 2), (3, 4))
]
ASSERTS = "import math\nwanted = 7\nassert add(1, 2) == 3\nassert math.isclose(add(3, 4), wanted)"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7\ncheck(add)"
READS = "a, b = map(int, input().split())\nprint({})"
FUNCTION = "def add(a, b):\n    return {}"
METHOD = "class Solution:\n    def add(self, a, b):\n        return {}"


def graded(text: str, label: Any, grader: CodeGrader = GRADER, **columns: Any) -> Grade | Failure:
    (grade,) = asyncio.run(grader.grade_all([Answer(text, label, columns=columns)]))
    return grade


def block(program: str) -> str:
    return f"Think.\n```python\nprint(0)\n```\nBetter:\n```python\n{program}\n```\nDone."


SHAPES = {
    "pairs": (READS, STDIN),
    "pairs as text": (READS, json.dumps(STDIN)),
    "rows": (READS, ROWS),
    "calls": (FUNCTION, CALLS),
    "calls of a method": (METHOD, CALLS),
    "functional": (METHOD, FUNCTIONAL),
    "asserts": (FUNCTION, ASSERTS),
    "check": (FUNCTION, CHECK),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_programs_pass_as_many_tests_as_they_pass(shape: str) -> None:
    template, label = SHAPES[shape]
    assert graded(block(template.format("a + b")), label) == Grade(1.0, {"passed": 1.0})
    assert graded(block(template.format("a * b + 1")), label) == Grade(0.0, {"passed": 0.5})
    assert graded(block(template.format("a - b")), label) == Grade(0.0, {"passed": 0.0})


def test_the_entry_point_may_be_a_column() -> None:
    text = CHECK.removesuffix("check(add)")
    assert graded(block(FUNCTION.format("a + b")), text, entry_point="add") == Grade(1.0, {"passed": 1.0})


@pytest.mark.parametrize("text", ["", "```python\nprint(3)", "```\nprint(3)\n```", "print(3)"])
def test_a_response_without_a_complete_block_scores_0(text: str) -> None:
    assert graded(text, STDIN) == Grade(0.0, {"passed": 0.0})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```Python3  \nx = '```'\n```", "x = '```'\n"),
        ("1. do\n   ```python\n   a\n   ```", "   a\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```python\r\na\r\n  b\r\n```\r\n", "a\n  b\n"),
        ('```python title="main.py"\na\n```', "a\n"),
        ("```python\na\n```\n```pythonic\nb\n```", "a\n"),
    ],
)
def test_the_last_python_block_counts(text: str, expected: str) -> None:
    assert last_block(text) == expected


def test_a_row_without_label_has_no_score() -> None:
    assert graded(block("print(3)"), None) == Grade(None)


# Programs that know nothing of the sum, and try to pass. Those for all shapes may also print.
CHEATS = {
    "leaves with success": "import os\nos._exit(0)",
    "leaves by an exception": "raise SystemExit(0)",
    "prints a verdict": "print('True', 1.0, '[true, true]', '{\"score\": 1}')\nimport os\nos._exit(0)",
    "never ends": "while True:\n    pass",
}
CHEATS_OF_FUNCTIONS = {
    "equals everything": "class Any(int):\n    __eq__ = lambda *_: True\nadd = lambda a, b: Any(5)",
    "is a list that equals": "class Any(list):\n    __eq__ = lambda *_: True\nadd = lambda a, b: Any()",
    "replaces functions": "import math\nmath.isclose = lambda *_, **__: True\nadd = lambda a, b: 5",
    "replaces json": "import json\njson.dumps = lambda value: '{\"value\": true}'\nadd = lambda a, b: 5",
    "writes values to every descriptor": """
import os
for number in range(1, 10):
    try:
        os.write(number, b'{"value": true}\\n' * 9)
    except OSError:
        pass
os._exit(0)""",
    "returns what cannot be compared": "add = lambda a, b: add",
    "returns too much": "add = lambda a, b: [0] * 10**7",
    "returns nested lists": "import functools\nadd = lambda a, b: functools.reduce(lambda x, _: [x], range(900), 5)",
}
CASES = [(name, shape) for name in CHEATS for shape in ("pairs", "calls", "asserts")]
CASES += [(name, shape) for name in CHEATS_OF_FUNCTIONS for shape in ("calls", "asserts")]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_program_cannot_make_its_verdict(name: str, shape: str) -> None:
    program, grader = (CHEATS | CHEATS_OF_FUNCTIONS)[name], CodeGrader(run, Limits(seconds=1.5), 2)
    assert graded(block(program), SHAPES[shape][1], grader=grader) == Grade(0.0, {"passed": 0.0})


# It looks for what is expected in files, environments and all variables of the process, and answers with it.
SEEKER = """
import gc, os, re, sys
def seek():
    found = [repr(gc.get_objects()), repr(os.environ)]
    frame = sys._getframe()
    while frame:
        found.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    for top in ("/work", "/tmp", "/proc/1", "/proc/self"):
        for name in os.listdir(top):
            if os.path.isfile(f"{top}/{name}"):
                try:
                    found.append(open(f"{top}/{name}", errors="replace").read(1 << 20))
                except OSError:
                    pass
    return next(iter(re.findall(r"wanted-[0-9]+", "".join(found))), "nothing")
{}
"""
SECRET = "wanted-" + "4711"
SOUGHT: dict[str, tuple[str, Any]] = {
    "pairs": ("print(seek())", {"inputs": ["{}"], "outputs": [SECRET]}),
    "calls": ("f = lambda x: seek()", {"fn_name": "f", "inputs": [["{}"]], "outputs": [SECRET]}),
    "asserts": ("f = lambda x: seek()", "x = '{}'\nexpected = '" + SECRET + "'\nassert f(x) == expected"),
    "asserts, and a name again": (
        "f = lambda x: seek()",
        f"x = '{{}}'\ny = '{SECRET}'\nassert f(x) == y\ny = f(x)\nassert y == '{SECRET}'",
    ),
}


@pytest.mark.parametrize("shape", SOUGHT)
def test_a_program_does_not_find_what_is_expected(shape: str) -> None:
    last, label = SOUGHT[shape]
    assert graded(block(SEEKER.replace("{}", last)), label) == Grade(0.0, {"passed": 0.0})
    # What it is given, it finds.
    given = json.loads(json.dumps(label).replace("{}", SECRET))
    found = graded(
        block(SEEKER.replace("{}", last).replace("frame = sys", "got = sys.stdin.read(); frame = sys")), given
    )
    assert found == Grade(1.0, {"passed": 1.0})


IN_ONE_PROCESS = {
    "leaves with success": "import os\nos._exit(0)",
    "equals everything": "class Any:\n    __eq__ = lambda *_: True\nadd = lambda a, b: Any()",
}


@pytest.mark.parametrize("cheat", IN_ONE_PROCESS)
def test_asserts_in_the_solutions_own_process_would_be_forged(cheat: str) -> None:
    source = IN_ONE_PROCESS[cheat] + "\nassert add(1, 2) == 3"
    assert asyncio.run(run(Program(source), Limits())).is_success
    assert graded(block(IN_ONE_PROCESS[cheat]), "assert add(1, 2) == 3") == Grade(0.0, {"passed": 0.0})


OWN_MATH = """
class Math:
    isclose = lambda *_, **__: True
math, sorted = Math(), lambda *_: [3]
area = lambda r: {}
"""


@pytest.mark.parametrize(
    "text",
    [
        "assert math.isclose(area(2), 12.56, rel_tol=0.001)",
        "is_close = math.isclose(area(2), 12.56, rel_tol=0.001)\nassert is_close",
        "given = 2\nr = area(given)\nassert math.isclose(r, 12.56, rel_tol=0.001)",
    ],
)
def test_a_module_that_the_tests_do_not_import_is_not_the_solutions(text: str) -> None:
    assert graded(block(OWN_MATH.format(5)), text) == Grade(0.0, {"passed": 0.0})
    assert graded(block(OWN_MATH.format("3.14 * r * r")), text) == Grade(1.0, {"passed": 1.0})
    assert "12.56" not in str(split_asserts(text).steps)


def test_the_tests_names_do_not_replace_the_solutions() -> None:
    program = "import math\nstr = 'mine'\ndef add(a, b):\n    return str"
    assert graded(block(program), "str = 'theirs'\nassert add(str, 1) == 'mine'") == Grade(1.0, {"passed": 1.0})


def test_values_that_break_a_comparison_end_nothing() -> None:
    label = {"fn_name": "f", "inputs": [[1]], "outputs": [1.5]}
    assert graded(block("f = lambda x: 10**400"), label) == Grade(0.0, {"passed": 0.0})


def test_any_exception_of_an_answer_is_its_failure() -> None:
    async def breaks(program: Program, limits: Limits) -> Result:
        raise OverflowError("too large")

    grader = CodeGrader(breaks, Limits(), 2)
    assert graded(block("print(3)"), STDIN, grader=grader) == Failure("error", "OverflowError: too large")


@pytest.mark.parametrize(
    ("given", "expected"), [("[1, 2]", (1, 2)), ("[1, 2]\n3", ([1, 2], 3)), ('"abc"', ("abc",)), ([1, "2"], (1, "2"))]
)
def test_arguments_may_be_text(given: Any, expected: tuple[Any, ...]) -> None:
    (test,) = read_tests(Answer("", {"fn_name": "f", "inputs": [given], "outputs": [3]}))
    assert isinstance(test, CallTest)
    assert test.arguments == expected


def test_a_failed_sandbox_is_no_score() -> None:
    async def cannot(program: Program, limits: Limits) -> Result:
        raise SandboxUnavailable("no namespaces")

    grader = CodeGrader(cannot, Limits(), 2)
    for label in (STDIN, CALLS, ASSERTS):
        assert graded(block("print(3)"), label, grader=grader) == Failure("sandbox", "no namespaces")


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "no test"),
        ({"input": "1"}, "not the shape of tests"),
        ([{"input": "1", "output": "1", "testtype": "interactive"}], "interactive"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "not named"),
        ([1], "not the shape of tests"),
        (5, "not the shape of tests"),
        ("x = 1", "assert nothing"),
        ("assert 1 == 1", "asserts nothing about the solution"),
        ("assert sum([1]) == 1", "asserts nothing about the solution"),
        ("for i in range(10**9):\n    assert add(i, 0) == i", "line 1"),
        ("for i in [1]:\n    assert add(i, 0) == i", "line 1"),
        ("for i in range(3):\n    while True:\n        pass", "line 1"),
        ("assert True, 'a message'", "assert nothing"),
        ("assert close(add(1, 2), 3)", "line 1 of the tests calls close"),
        ("assert close(tolerance=1, value=[add(1, 2)])", "calls close"),
        ("def check(f):\n    r = f(1, 2)\n    assert close(r, 3)\ncheck(add)", "calls close"),
        ("r = abs(add(1, 2))\nassert add(r, 1) == 4", "outside its sandbox"),
        ("r = 3\nr = abs(add(1, 2))\nassert r == 3", "assigns anew"),
        ("import random\nr = random.Random(1)\nx = r.random()\nassert add(x, 1) == x + 1", "draws at random"),
        ("import uuid\nx = uuid.uuid4().int\nassert add(x, 1) == x + 1", "draws at random"),
        ({"fn_name": "add", "inputs": [{"a": 1}], "outputs": [3]}, "arguments of a call are dict"),
        ({"fn_name": "add", "inputs": ['{"a": 1}'], "outputs": [3]}, "arguments of a call are dict"),
        ([{"input": {"a": 1}, "output": "1", "testtype": "functional", "fn_name": "add"}], "a call are dict"),
        ("assert all(add(i, 0) == i for i in range(3))", "loop"),
        ("from math import *\nassert add(1, 2) == 3", "line 1"),
        ("def check(candidate):\n    assert candidate(1) == 1", "entry_point"),
        ("def add(", "no Python"),
        ("assert add(1, 2) == 3\nx = 1 / 0", "cannot be evaluated: ZeroDivisionError"),
    ],
)
def test_tests_that_cannot_be_read_are_no_score(label: Any, reason: str) -> None:
    found = graded(block(FUNCTION.format("a + b")), label)
    assert isinstance(found, Failure)
    assert found.kind == "error"
    assert reason in found.reason


def test_what_a_test_expects_has_to_fit_into_the_output() -> None:
    found = graded(block("print(3)"), {"inputs": [""], "outputs": ["x" * (300 << 10)]})
    assert isinstance(found, Failure)
    assert "sandbox.output_kib" in found.reason


def test_after_a_test_that_takes_too_long_the_others_fail() -> None:
    programs = []

    async def counted(program: Program, limits: Limits) -> Result:
        programs.append(program)
        return await run(program, limits)

    grader = CodeGrader(counted, Limits(seconds=0.5), 1)
    label = {"inputs": ["0", "1", "0"], "outputs": ["0"] * 3}
    program = "if input() == '1':\n    while True:\n        pass\nprint(0)"
    assert graded(block(program), label, grader=grader) == Grade(0.0, {"passed": 1 / 3})
    assert len(programs) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r = add(1, 2)\nassert r == 3\nassert [r, add(3, 4)] == [3, 7]", 1.0),
        ("assert add((1,), (2,)) == (1, 2)", 1.0),
        ("assert add('a', b'b'.decode()) == 'ab'", 1.0),
        ("given = [1]\nassert add(given, [2]) == [1, 2]\nassert add({1: 2}, 3) == 3", 0.5),
        ("assert add(add(1, 1), 2) == 4, 'message'", 1.0),
        ("assert not add(1, 2) == 4", 1.0),
        ("assert isinstance(add(1.0, 2), float)", 1.0),
        ("assert add(1, 2) is True", 0.0),
        ("assert True, 'good for debugging'\nassert add(1, 2) == 3", 1.0),
        ("for i in range(2, 5):\n    x = i * i\n    assert add(i, x) == i + i * i", 1.0),
        ("for i in range(2):\n    assert add(i, 1) == 1", 0.5),
        ("x = sum([i**2 for i in [1, 2]])\nassert add(1, 4) == x == sum(i**2 for i in [1, 2])", 1.0),
        ("assert math.isclose(add(1, math.pi), 4.14159, rel_tol=1e-3)", 1.0),
        ("r = abs(add(-1, -2))\nassert r == 3", 1.0),
        ("r = abs(add(1, ''))\nassert r == 3\nassert add(1, 2) == 3", 0.5),
        ("r = [add(1, 2), add(3, 4)]\nassert r == [3, 7]", 1.0),
        ("str = 'ab'\nassert add(str, 'c') == str + 'c'", 1.0),
        ("import random\nunused = random.random()\nx, y = random.random(), 1\nassert add(x, y) == x + y", 1.0),
        (
            "from random import choice\nfor _ in range(9):\n    x = choice(range(9999))\n    assert add(x, 1) == x + 1",
            1.0,
        ),
    ],
)
def test_asserts_of_several_forms(text: str, expected: float) -> None:
    found = graded(block(FUNCTION.format("a + b")), text)
    assert isinstance(found, Grade)
    assert found.parts == {"passed": expected}


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1000000", "1000001", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("nan", "1.0", False),
        ("1e999999999", "1.0", False),
        ("Yes", "YES", False),
        ("", "", True),
    ],
)
def test_which_outputs_are_the_same(printed: str, expected: str, is_same: bool) -> None:
    assert same_output(printed, expected) is is_same


@pytest.mark.parametrize(
    ("value", "expected", "is_same"),
    [
        ([1, [2.0000001]], [1, [2.0]], True),
        ([1, 2], [1], False),
        ({"a": 1.0}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        (float("nan"), float("nan"), False),
        ("1", 1, False),
        (None, None, True),
        (True, 1, False),
        (1, True, False),
        ([True, False], [1, 0], False),
        (True, 1.0, False),
        ({"a": True}, {"a": True}, True),
        (10**400, 1.5, False),
    ],
)
def test_which_values_are_the_same(value: Any, expected: Any, is_same: bool) -> None:
    assert same_value(value, expected) is is_same


def test_a_configuration_names_it() -> None:
    config = resolve({"model": "tiny", "site": "local", "set": "data.reward=code sandbox.seconds=5"}, CONFIG_DIR).config
    groups: Sequence[Sequence[Answer]] = [[Answer(block("print(3)"), {"inputs": [""], "outputs": ["3"]})]]
    with GraderPool.of(config) as pool:
        scorer = Scorer(config, pool)
        ((scored,),) = asyncio.run(scorer.score(groups))
        assert not scorer.needs_label(scorer.terms[""][0])
    assert (scored.reward, scored.parts) == (1.0, {"code/passed": 1.0})
