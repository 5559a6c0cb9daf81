import pytest

from posttrain.config.reward import Reward
from posttrain.rl.reward.answer import Answer
from posttrain.rl.reward.grade import grade
from posttrain.rl.reward.shape import ShapeSettings

SETTINGS = ShapeSettings(target_tokens=100, max_tokens=1000, overlong_buffer_tokens=200, repetition_ngram=2)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("<think>a</think>4", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(response, score):
    assert grade("format", Answer(response)).score == score
    assert grade("format", Answer(response, is_truncated=True)).score == 0.0


def test_a_format_of_one_s_own():
    assert grade("format", Answer("x = 7"), ShapeSettings(format_pattern=r"x = \d+")).score == 1.0
    assert grade("format", Answer("x = 7!"), ShapeSettings(format_pattern=r"x = \d+")).score == 0.0


@pytest.mark.parametrize(("tokens", "score"), [(100, 1.0), (50, 0.5), (150, 0.5), (0, 0.0), (200, 0.0), (900, 0.0)])
def test_length(tokens, score):
    assert grade("length", Answer("", num_tokens=tokens), SETTINGS).score == pytest.approx(score)


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, 0.0), (800, 0.0), (801, -0.005), (900, -0.5), (1000, -1.0), (5000, -1.0)]
)
def test_overlong_is_equation_13_of_dapo(tokens, score):
    assert grade("overlong", Answer("", num_tokens=tokens), SETTINGS).score == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "score"),
    [("a b c d", 0.0), ("a b a b", -1 / 3), ("a a a a a", -0.75), ("A a", 0.0), ("a", 0.0), ("", 0.0)],
)
def test_repetition(text, score):
    assert grade("repetition", Answer(text), SETTINGS).score == pytest.approx(score)


@pytest.mark.parametrize(
    "settings", [{"target_tokens": 0}, {"repetition_ngram": 0}, {"max_tokens": 10, "overlong_buffer_tokens": 11}]
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=r"must be positive|exceeds"):
        ShapeSettings(**settings)


def test_settings_may_be_as_small_as_one_token():
    settings = ShapeSettings(target_tokens=1, max_tokens=1, overlong_buffer_tokens=1, repetition_ngram=1)
    assert grade("overlong", Answer("", num_tokens=1), settings).score == -1.0
    assert grade("repetition", Answer("a a b b"), settings).score == -0.5


def test_settings_that_nobody_chooses_are_those_of_the_configuration():
    chosen, own = Reward(), ShapeSettings()
    for name in ("format_pattern", "target_tokens", "overlong_buffer_tokens", "repetition_ngram"):
        assert getattr(own, name) == getattr(chosen, name)
    # DAPO's answers have 16,384 tokens without punishment and up to 4,096 more (arXiv:2503.14476, section 4.1).
    assert own.max_tokens == 16384
