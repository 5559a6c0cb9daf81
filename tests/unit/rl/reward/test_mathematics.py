"""Equality against what math-verify 0.9.0 says of its own published cases, and labels of every form.

The cases are restated from the tests in its source distribution (Apache-2.0): test_all.py, test_numina_cases.py,
test_open_thoughts.py, test_yujianll.py. They are a regression and not the truth: where we differ stands why.
"""

import pytest

from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.equality import are_equal
from posttrain.rl.reward.grade import grade
from posttrain.rl.reward.mathematics import labels_of, last_boxed

# label, answer, verdict of both
SHARED = [
    ("-5", "-5", True),
    ("7425000", "7,425,000", True),
    ("1000", "1 000", True),
    ("1000", "1000.0", True),
    ("1000.0", "1,000.0", True),
    ("0.4", ".4", True),
    ("1000.99", "$1,000.99", True),
    ("1000.99", "1,000.99€", True),
    ("10/9", r"\frac{10}{9}", True),
    ("-10/9", r"-\frac{10}{9}", True),
    ("[0,1)", "[0,1)", True),
    ("[0,9)", "[0,1)", False),
    ("(0,9)", "[0,9)", False),
    ("1", "-[0,1)", False),
    ("1/3", r"\frac13", True),
    ("1", r"\frac3{3}", True),
    (r"\sqrt{3}", r"\sqrt3", True),
    ("1/3", r"\cfrac{1}{3}", True),
    ("1/3", r"\left( \frac{1}{3} \right)", True),
    ("1/3", r"\frac{1}{3} \text{meters}", True),
    ("1/3", r"k = \frac{1}{3}", True),
    (r"28\%", "28 percent", True),
    (r"28\%", "28 pct", True),
    (r"28\%", "28", True),
    ("0.28", "28", False),
    ("28/100", "28", False),
    ("2-2p", "2-2p", True),
    (r"14{,}916", "14,916", True),
    (r"12\text{ and }13", "12, 13", True),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", True),
    (r"\text{Evelyn}", "Evelyn", True),
    ("(p,q)=(3,2)", "(3,2)", True),
    ("(11,7)or(7,11)", r"(7,11),\ (11,7)", True),
    ("AB=4,CD=5", "4, 5", True),
    (r"\frac{NO}{BO}=\frac{1}{\sqrt{6}}", r"\frac{1}{\sqrt{6}}", True),
    ("(p,q,r)=(3,2,7)", "(3,2,7)", True),
    ("-12;-11;-10;-8;-7;-6", r"\{-12, -11, -10, -8, -7, -6\}", True),
    (r"\text{e}", "e", True),
    ("d", r"\text{E}", False),
    ("21,16 or 11", "21,16,11", True),
    (r"p = -1 \text{ and } p = \dfrac{15}{8}", r"p=-1,p=\frac{15}{8}", True),
    ("0<f(x)<1", "(0,1)", True),
    ("n=1, 2, 3", "n=1, 2, 3", True),
    ("D = (0, 1)", "D = (0, 1.5)", False),
    (r"\pm 2021", "-2021, 2021", True),
    ("12:00", "1:00", False),
    ("-793 < a < 10", "(-793, 10)", True),
    (r"a_3 = 2, a_{37} = 19", r"a_{37} = 19, \quad a_3 = 2", True),
    ("(1, +\\infty)", "(1, \\infty)", True),
    (r"k \ge 2", "2 \\leq k", True),
    ("|AB|=1", "1", True),
    ("f(x)=1", "1", True),
    (r"10^{\frac{-5+\sqrt{13}}{6}}", r"10^{\frac{\sqrt{13} - 5}{6}}", True),
    (r"\frac{1}{2}+\frac{31\sqrt{5}}{216}", r"\dfrac{108 + 31\sqrt{5}}{216}", True),
    ("4", r"4\sqrt{2}", False),
]
# label, answer, our verdict, why it is not theirs
DIFFERENT = [
    ("1000.99", "1000,99", False, "a decimal comma is a list of two numbers here"),
    ("1,22", "1.22", False, "a decimal comma is a list of two numbers here"),
    ("10", "(9+1)", False, "a sum that is left to compute is not the number"),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}", False, "theirs compares the 1 that both begin with"),
    ("4.123105625617661", r"\sqrt{17}", False, "a decimal is the number it writes, not what it rounds"),
    (r"x \in [-2,7]", r"-2 \le x \le 7", True, "theirs is not symmetric here"),
    (r"\text{13}", "13", True, "a number in \\text is the number"),
]


@pytest.mark.parametrize(("label", "answer", "verdict"), SHARED)
def test_equality_as_math_verify_has_it(label, answer, verdict) -> None:
    assert are_equal(answer, label) == verdict


@pytest.mark.parametrize(("label", "answer", "verdict", "reason"), DIFFERENT)
def test_equality_where_math_verify_differs(label, answer, verdict, reason) -> None:
    assert are_equal(answer, label) == verdict, reason


@pytest.mark.parametrize(
    ("label", "answers"),
    [
        ("72", ["72"]),
        (72, ["72"]),
        (7.5, ["7.5"]),
        (1e-7, ["0.0000001"]),
        ("48/2 = <<48/2=24>>24\n#### 72", ["72"]),
        (r"Thus \boxed{\frac{1}{2}}.", [r"\frac{1}{2}"]),
        (["1", 2, r"\boxed{3}"], ["1", "2", "3"]),
        (True, ["True"]),
    ],
)
def test_labels(label, answers) -> None:
    assert labels_of(label) == answers


@pytest.mark.parametrize("label", [{"answer": 1}, float("nan"), float("inf"), [None]])
def test_what_is_no_label_is_refused(label) -> None:
    with pytest.raises(ValueError, match="no label for mathematics"):
        labels_of(label)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}} \boxed{3", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"} \boxed{7}", "7"),
        (r"{ \boxed{7}", "7"),
        ("{7}", None),
        (r"\boxed{7", None),
        ("", None),
    ],
)
def test_the_last_complete_box(text, content) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("convention", "text", "characters"),
    [("math_dapo", "Answer: 142", 300), ("math_answer", "142 and no more", 10_000)],
)
def test_the_answer_stands_at_the_end(convention, text, characters) -> None:
    end = "\n" + "." * (characters - len(text) - 1)
    assert grade(convention, Answer(text + end, "142")).score == 1.0
    assert grade(convention, Answer(text + end + ".", "142")).score == 0.0


def test_an_answer_without_a_label_is_not_graded() -> None:
    assert grade("math", Answer(r"\boxed{7}")).score is None


@pytest.mark.parametrize("code", ["__import__('os').system('true')", "().__class__", "exec('1')", "lambda: 1"])
def test_no_answer_runs_as_code(code, monkeypatch) -> None:
    def refuse(*arguments):
        raise AssertionError("evaluated")

    monkeypatch.setattr("builtins.eval", refuse)
    monkeypatch.setattr("builtins.exec", refuse)
    assert grade("math", Answer(rf"\boxed{{{code}}}", r"x^2+\sqrt{3}")).score == 0.0
