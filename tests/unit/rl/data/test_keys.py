import pytest

from posttrain.errors import ConfigError
from posttrain.rl.data.keys import AbsentError, parse_key

ROW = {
    "answer": "72",
    "reward_model": {"style": "rule", "ground_truth": "72", "nothing": None},
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "extra_info": {"a.b": 1},
    "c.d": 2,
    "wide": dict.fromkeys("abcdefghi", 0),
    "empty": {},
    "null": None,
    "e.f": None,
}


@pytest.mark.parametrize(
    ("text", "parts", "value"),
    [
        ("answer", ("answer",), "72"),
        ("reward_model.ground_truth", ("reward_model", "ground_truth"), "72"),
        ("messages[-1].content", ("messages", -1, "content"), "b"),
        ("messages[-2].content", ("messages", -2, "content"), "a"),
        ("messages[0]", ("messages", 0), {"role": "user", "content": "a"}),
        ('extra_info["a.b"]', ("extra_info", "a.b"), 1),
        ("extra_info['a.b']", ("extra_info", "a.b"), 1),
        ("messages[:-1]", ("messages", (None, -1)), [{"role": "user", "content": "a"}]),
        ("messages[-1:]", ("messages", (-1, None)), [{"role": "assistant", "content": "b"}]),
        ("messages[0:1]", ("messages", (0, 1)), [{"role": "user", "content": "a"}]),
        ("messages[1:][0].content", ("messages", (1, None), 0, "content"), "b"),
        ("messages[:]", ("messages", (None, None)), ROW["messages"]),
        ("messages[5:]", ("messages", (5, None)), []),
        ("c.d", ("c", "d"), 2),
        ('["c.d"]', ("c.d",), 2),
    ],
)
def test_a_key_leads_to_a_value(text, parts, value):
    key = parse_key(text)
    assert (key.parts, key.find(ROW)) == (parts, value)
    assert (key.column, key.is_column) == (parts[0], len(parts) == 1)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", 1),
        (".a", 1),
        ("a.", 2),
        ("a..b", 2),
        ("a[", 2),
        ("a[x]", 2),
        ("a b", 2),
        ("[0]", 4),
        ('a["', 2),
        ("a]", 2),
        ("a[::2]", 2),
        ("a[1:x]", 2),
        ("[:1]", 5),
    ],
)
def test_what_is_no_key_is_told_by_its_place(text, place):
    with pytest.raises(ConfigError) as raised:
        parse_key(text, "data.prompt_key")
    (problem,) = raised.value.problems
    assert (problem.key, problem.value) == ("data.prompt_key", repr(text))
    assert problem.remedy == f"correct it from character {place} on"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("label", "'label' is missing"),
        ("null", "'null' is missing"),
        ("e.f", "'e.f' is missing"),
        ("anwser", "'anwser' is missing (did you mean answer?)"),
        ("reward_model.truth", "'reward_model.truth' is missing: 'reward_model' has style, ground_truth, nothing"),
        (
            "reward_model.ground_truht",
            "'reward_model.ground_truht' is missing (did you mean reward_model.ground_truth?)",
        ),
        ("reward_model.nothing", "'reward_model.nothing' is missing"),
        ("reward_model.nothing.more", "'reward_model.nothing.more' is missing: 'reward_model.nothing' is null"),
        ("answer.text", "'answer.text' is missing: 'answer' is a str, not an object"),
        ("answer[0]", "'answer[0]' is missing: 'answer' is a str, not a list"),
        ("answer[:-1]", "'answer[:-1]' is missing: 'answer' is a str, not a list"),
        ("messages[:1].content", "'messages[:1].content' is missing: 'messages[:1]' is a list, not an object"),
        ("messages[-1:][3]", "'messages[-1:][3]' is missing: 'messages[-1:]' has 1 elements"),
        ("messages[-3]", "'messages[-3]' is missing: 'messages' has 2 elements"),
        ("messages[2].content", "'messages[2].content' is missing: 'messages' has 2 elements"),
        ("wide.zz", "'wide.zz' is missing: 'wide' has a, b, c, d, e, f, g, h"),
        ("empty.zz", "'empty.zz' is missing: 'empty' has nothing"),
        ("messages[-1].text", "'messages[-1].text' is missing: 'messages[-1]' has role, content"),
    ],
)
def test_what_is_missing_is_told_with_what_is_there(text, reason):
    with pytest.raises(AbsentError) as raised:
        parse_key(text).find(ROW)
    assert str(raised.value) == reason
