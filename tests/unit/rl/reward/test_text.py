import pytest

from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.grade import grade


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("Answer: B", "B", 1.0),
        ("The answer is (C).", "C", 1.0),
        (r"so \boxed{B}", "B", 1.0),
        (r"so \boxed{\text{(B)}}", "(B)", 1.0),
        (r"so \boxed{B. Paris}", "B", 1.0),
        ("(A) is wrong, so (D)", "D", 1.0),
        ("(A) is wrong, so (D)", "A", 0.0),
        ("First answer: A. Then answer: C", "C", 1.0),
        ("**Answer:** b", "B", 1.0),
        ("B", "B", 1.0),
        ("b.", "B", 1.0),
        ("B", 1, 1.0),
        ("A", 0, 1.0),
        ("A", 1, 0.0),
        ("A car is red", "A", 0.0),
        ("The answer is a car", "A", 0.0),
        ("", "A", 0.0),
    ],
)
def test_choice(response, label, score):
    assert grade("choice", Answer(response, label)).score == score


@pytest.mark.parametrize("label", ["Paris", True, -1, 26, ["A"]])
def test_what_is_no_choice_is_refused(label):
    with pytest.raises(ValueError, match="no label for a choice"):
        grade("choice", Answer("A", label))


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("the Eiffel Tower", "Eiffel tower!", 1.0),
        ("Eiffel", "Eiffel tower", 2 / 3),
        ("b c d", "c d e", 2 / 3),
        ("a c d", "c d the", 1.0),
        ("b b c", "b d", 0.4),
        ("Paris", ["London", "Paris, France"], 2 / 3),
        ("Rome", ["London", "Paris"], 0.0),
        ("the", "", 1.0),
        ("Rome", "the", 0.0),
        ("Rome", [], 0.0),
    ],
)
def test_f1(response, label, score):
    assert grade("f1", Answer(response, label)).score == pytest.approx(score)


def test_one_of_several_labels_is_an_exact_match():
    assert grade("exact_match", Answer(" yes\n", ["no", "yes"])).score == 1.0
    assert grade("exact_match", Answer("maybe", ["no", "yes"])).score == 0.0
