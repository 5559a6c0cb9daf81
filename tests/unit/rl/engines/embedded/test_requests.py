import pytest

from posttrain.rl.engines.embedded.requests import ModelLimits, RequestError, parse_request

LIMITS = ModelLimits(vocab_size=64, max_positions=160, eos_token_ids=frozenset({1, 2}))


def test_a_batch_with_parameters_per_prompt():
    parameters = [
        {"max_new_tokens": 4, "temperature": 0.5, "sampling_seed": 9, "top_p": 0.9},
        {"max_new_tokens": 5, "ignore_eos": True, "stop_token_ids": [3]},
    ]
    parsed = parse_request({"input_ids": [[5, 6], [7]], "sampling_params": parameters, "rid": "r"}, LIMITS)
    first, second = parsed.rows
    assert parsed.is_batch
    assert not parsed.stream
    assert (first.input_ids, first.max_new_tokens, first.temperature, first.sampling_seed) == (
        (5, 6),
        4,
        0.5,
        9,
    )
    assert first.stop_token_ids == {1, 2}
    assert (first.top_p, second.top_p) == (0.9, 1.0)
    assert second.stop_token_ids == {3}
    assert (first.request_id, second.request_id) == ("r_0", "r_1")


def test_one_prompt_is_no_batch():
    parsed = parse_request({"input_ids": [5, 6], "sampling_params": {}, "stream": True}, LIMITS)
    assert not parsed.is_batch
    assert parsed.stream
    assert len(parsed.rows) == 1


def test_prompt_and_response_may_fill_the_model_exactly():
    body = {"input_ids": [3] * 158, "sampling_params": {"max_new_tokens": 2}}
    assert parse_request(body, LIMITS).rows[0].max_new_tokens == 2


@pytest.mark.parametrize(
    ("prompts", "parameters", "said"),
    [
        ([[5], [64]], {}, "prompt 1: token 64 at position 0 is not in the vocabulary, 0 to 63"),
        ([[5, -1]], {}, "token -1 at position 1"),
        ([[5, 1.5]], {}, "token 1.5"),
        ([[5, True]], {}, "token True"),
        ([[5], []], {}, "prompt 1: empty"),
        ([], {}, "empty"),
        ("hello", {}, "a list of token ids"),
        (None, {}, "text is not served"),
        (
            [[5] * 158],
            {"max_new_tokens": 3},
            "158 tokens and max_new_tokens 3 exceed the model's 160 positions",
        ),
        ([[5]], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([[5]], {"max_new_tokens": 2.5}, "max_new_tokens = 2.5"),
        ([[5]], {"temperature": -1}, "temperature = -1"),
        ([[5]], {"temperature": float("nan")}, "temperature = nan"),
        ([[5]], {"sampling_seed": "7"}, "sampling_seed = '7'"),
        ([[5]], {"top_p": 0}, "top_p = 0, between 1e-06 and 1 is needed"),
        ([[5]], {"top_p": 1.1}, "top_p = 1.1"),
        ([[5]], {"top_k": 40}, "top_k = 40"),
        ([[5]], {"min_tokens": 4}, "sampling parameter min_tokens"),
        ([[5], [6]], [{}], "a list of 2"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(prompts, parameters, said):
    with pytest.raises(RequestError, match=said):
        parse_request({"input_ids": prompts, "sampling_params": parameters}, LIMITS)


def test_a_batch_is_not_streamed():
    with pytest.raises(RequestError, match="stream"):
        parse_request({"input_ids": [[5]], "stream": True}, LIMITS)
