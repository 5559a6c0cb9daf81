import pytest

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.engines.embedded.openai_requests import parse_chat, parse_completions
from posttrain.rl.engines.embedded.requests import ModelLimits, RequestError
from posttrain.rl.engines.embedded.texts import Texts

LIMITS = ModelLimits(vocab_size=64, max_positions=160, eos_token_ids=frozenset({1, 2}))
ASKED = [{"role": "user", "content": "3141"}]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(256).save_pretrained(folder)
    return Texts(folder)


def test_rows_have_the_parameters_in_our_words(texts):
    body = {
        "model": "any",
        "prompt": [[5, 6], "ab"],
        "n": 2,
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 9,
        "stop": "q",
        "logprobs": 3,
        "echo": True,
        "stop_token_ids": [3],
        "presence_penalty": 0,
    }
    asked = parse_completions(body, texts, LIMITS)
    assert (asked.num_choices, asked.stops, asked.with_logprobs) == (2, ("q",), True)
    assert asked.echoes == (texts.spelled([5, 6]), "ab")
    assert [row.input_ids for row in asked.rows] == [(5, 6)] * 2 + [tuple(texts.encode("ab"))] * 2
    assert [row.sampling_seed for row in asked.rows] == [9, 10, 9, 10]
    row = asked.rows[0]
    assert (row.max_new_tokens, row.temperature, row.top_p) == (4, 0.5, 0.9)
    assert (row.stop_token_ids, row.num_alternatives, row.scores_prompt) == ({1, 2, 3}, 3, True)
    assert row.stop_texts(texts.encode("q")) == "q"


def test_defaults_are_openais(texts):
    (row,) = parse_completions({"prompt": "ab", "stop": None, "seed": None}, texts, LIMITS).rows
    assert (row.max_new_tokens, row.temperature, row.top_p, row.sampling_seed) == (16, 1.0, 1.0, None)
    assert (row.stop_texts, row.scores_prompt, row.num_alternatives) == (None, False, 0)
    (row,) = parse_chat({"messages": ASKED}, texts, LIMITS).rows
    assert row.max_new_tokens == 160 - len(row.input_ids)
    (row,) = parse_chat({"messages": ASKED, "max_completion_tokens": 3}, texts, LIMITS).rows
    assert row.max_new_tokens == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prompt": []}, "prompt: a text"),
        ({"prompt": 3}, "prompt: a text"),
        ({"prompt": ["a", []]}, "prompt 1: empty"),
        ({"prompt": [5, 64]}, "prompt 0: token 64 at position 1"),
        ({"prompt": [5] * 150}, "150 tokens and max_tokens 16 exceed the model's 160 positions"),
        ({"max_tokens": 0}, "max_tokens = 0, at least 1"),
        ({"max_tokens": -1, "echo": True}, "max_tokens = -1, at least 0"),
        ({"max_tokens": 2.5}, "max_tokens = 2.5"),
        ({"logprobs": True}, "logprobs = True"),
        ({"logprobs": 21}, "logprobs = 21, between 0 and 20"),
        ({"echo": 1}, "echo = 1, true or false"),
        ({"n": 0}, "n = 0"),
        ({"n": 2, "best_of": 3}, "best_of = 3 is not supported, only 2"),
        ({"suffix": "b"}, "suffix"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"top_p": 0}, "top_p = 0"),
        ({"seed": "7"}, "seed = '7' is not a whole number"),
        ({"stop": ["a", ""]}, "stop = "),
        ({"stop": 7}, "stop = 7"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stream": True}, "stream = true is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"guided_json": {}}, "guided_json: not supported"),
        ({"messages": ASKED}, "messages: not supported"),
    ],
)
def test_what_cannot_be_completed_is_refused_with_a_reason(texts, more, said):
    with pytest.raises(RequestError) as refused:
        parse_completions({"prompt": "ab", **more}, texts, LIMITS)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"messages": []}, "messages: a list of objects"),
        ({"messages": "hello"}, "messages: a list of objects"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]: image_url in its content"),
        ({"tools": ["sum"]}, "tools: a list of objects"),
        ({"tool_choice": "required"}, "tool_choice = 'required'"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"top_logprobs": 2}, "top_logprobs: logprobs = true"),
        ({"max_tokens": 160}, "exceed the model's 160 positions"),
        ({"prompt": "a"}, "prompt: not supported"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_a_reason(texts, more, said):
    with pytest.raises(RequestError) as refused:
        parse_chat({"messages": ASKED, **more}, texts, LIMITS)
    assert said in str(refused.value)
