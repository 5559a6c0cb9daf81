"""The environment `calculator`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from fractions import Fraction

import pytest

from posttrain.rl.environments.calculator import TOOL, Calculator, calculate
from posttrain.rl.environments.tool_calls import parse_action
from posttrain.rl.reward.expression import read_expression

ROW = {"messages": [{"role": "user", "content": "What is 12*34?"}], "label": "408"}


def play(*texts: str, label: str = "408"):
    """Return what the agent reads after each response, and the reward."""

    async def episode():
        environment, read, done = Calculator(0), [], False
        messages, tools = await environment.reset(ROW | {"label": label})
        assert (messages, tools) == (ROW["messages"], [TOOL])
        for text in texts:
            assert not done
            answers, done = await environment.step(parse_action(text, tools))
            read += [answer["content"] for answer in answers]
        return read, done, await environment.reward({})

    return asyncio.run(episode())


def call(expression: object, name: str = "calculator") -> str:
    argument = repr(expression).replace("'", '"')
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": {argument}}}}}</tool_call>'


def test_an_episode_with_a_call_and_the_answer():
    assert play(call("12*34"), "408") == (["408"], True, 1.0)


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [
        *((" 408\n", "408", 1), ("408.0", "408", 1), ("+408", "408", 1), ("7/2", "3.5", 1), ("-14/4", "-3.5", 1)),
        *(("409", "408", 0), ("12*34", "408", 0), ("The answer is 408", "408", 0), ("", "0", 0), ("1/0", "0", 0)),
        *(("4e2", "400", 0), ("٤", "4", 0), ("9" * 100_000, "9", 0)),
    ],
)
def test_the_final_answer_is_the_number_alone(answer, label, reward):
    assert play(answer, label=label) == ([], True, reward)


def test_without_a_final_answer_the_reward_is_zero():
    assert play(call("0"), label="0")[2] == 0


@pytest.mark.parametrize("label", ["many", "", "1/0", None])
def test_a_label_that_is_no_number_is_an_error(label):
    with pytest.raises(ValueError, match="is not a number"):
        play("0", label=label)


def test_errors_are_read_by_the_agent():
    texts = (call("1/0"), call("2**9"), call(3), call("1", name="search"), call("x"))
    read, done, _ = play(*texts, '<tool_call>{"name": "calculator", "arguments": "1"}</tool_call>')
    assert not done
    assert read == [
        "error: division by zero",
        "error: an expression has numbers, + - * / and parentheses only",
        "error: give the argument expression, a text",
        "error: there is no function 'search'; call calculator",
        "error: an expression has numbers, + - * / and parentheses only",
        "error: give the argument expression, a text",
    ]


def test_values_are_those_of_an_independent_grammar():
    """That of LaTeX, which graders use."""
    rng = random.Random(0)
    values = {expression: read_expression(expression) for expression in (_expression(rng, 3) for _ in range(40))}
    for expression, value in values.items():
        if value.is_Rational:
            assert calculate(expression) == str(value), expression
        else:
            with pytest.raises(ValueError, match="division by zero"):
                calculate(expression)
    assert {value.is_Rational for value in values.values()} == {True, False}


def test_decimals_are_exact():
    assert calculate("0.10000000000000000000001*10") == str(1 + Fraction(1, 10**22))
    assert calculate(" -(1.5 - +3.) / .5") == "3"


def test_the_dearest_expressions_take_no_time():
    start = time.perf_counter()
    for expression in ("(" * 99 + "1" + ")" * 99, "-" * 199 + "1", "9/" * 99 + "1", "9*" * 99 + "1"):
        with contextlib.suppress(ValueError):
            calculate(expression)
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", "2(3)", "(1)(2)", "(1)2", "1 2", "2* *3", "7//2", "7/ /2", "1,000", "1e3", "0x1", "()", "(1", "1+"),
        *("*1", "__import__('os')", "\\frac{1}{2}", "1" * 201),
    ],
)
def test_what_is_no_expression_is_refused(expression):
    with pytest.raises(ValueError, match="an expression has"):
        calculate(expression)


def _expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice((str(rng.randrange(20)), f"{rng.randrange(9)}.{rng.randrange(99)}"))
    text = f"{_expression(rng, depth - 1)}{rng.choice(('+', ' - ', '*', '/', ' * '))}{_expression(rng, depth - 1)}"
    return f"({text})" if rng.random() < 0.5 else text
