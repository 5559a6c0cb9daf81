import json

import numpy as np
import pytest

from posttrain.rl.engines.responses import (
    GenerateRequest,
    GenerateResult,
    check_prompts,
    generate_body,
    parse_generate_answer,
)
from posttrain.types import VersionSpan


def answer(tokens, logprobs, reason="stop", version="12"):
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": pairs, "weight_version": version}
    return {"output_ids": list(tokens), "meta_info": meta}


def test_a_batch_is_one_body_with_parameters_per_prompt():
    body = generate_body([GenerateRequest((5, 6), 7, 3, 0.5), GenerateRequest((8,), 9, 4)])
    assert body["input_ids"] == [[5, 6], [8]]
    assert body["return_logprob"] is True
    first, second = body["sampling_params"]
    assert (first["sampling_seed"], first["max_new_tokens"], first["temperature"]) == (7, 3, 0.5)
    assert (second["sampling_seed"], second["max_new_tokens"], second["temperature"]) == (9, 4, 1.0)
    assert (second["top_p"], second["ignore_eos"]) == (1.0, False)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [((), "prompt 1 is empty"), ((5, 64), "token 64"), ((0, 64), "token 64"), ((-1, 5), "token -1")],
)
def test_a_prompt_that_would_end_sglang_is_not_sent(prompt, said):
    check_prompts([GenerateRequest((0, 63), 0, 1), GenerateRequest((0,), 0, 1)], 64)
    with pytest.raises(ValueError, match=said):
        check_prompts([GenerateRequest((5,), 0, 1), GenerateRequest(prompt, 0, 1)], 64)


def test_float32_logprobs_survive_json():
    logprobs = [float(np.float32(-value)) for value in np.random.default_rng(0).exponential(3, 8)]
    text = json.dumps([answer(range(8), logprobs)])
    (result,) = parse_generate_answer(json.loads(text), [GenerateRequest((1,), 0, 8)])
    spans = (VersionSpan(12, 8),)
    assert result == GenerateResult(tuple(range(8)), tuple(logprobs), "stop", 12, versions=spans)
    assert all(np.float32(value) == value for value in result.logprobs)


def test_tokens_of_an_engine_without_weights_are_refused():
    with pytest.raises(ValueError, match="has not got its weights yet"):
        parse_generate_answer([answer([3], [-1.0], version="none")], [GenerateRequest((1,), 0, 8)])


def test_an_engine_without_a_numbered_version_has_none():
    (result,) = parse_generate_answer([answer([3], [-1.0], version="default")], [GenerateRequest((1,), 0, 8)])
    assert result.weight_version is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "0 results for 1 requests"),
        (answer([3], [-1.0]), "a dict instead of results"),
        ([answer([3], [-1.0], reason="abort")], "finish reason 'abort'"),
        ([answer([], [])], "0 of 2 tokens"),
        ([answer([1, 2, 3], [-1.0] * 3)], "3 of 2 tokens"),
        (
            [{"output_ids": [3], "meta_info": {"finish_reason": {"type": "stop"}}}],
            "unreadable result at place 0",
        ),
        ([{"meta_info": {"finish_reason": None}}], "unreadable result at place 0"),
    ],
)
def test_what_is_no_complete_result_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        parse_generate_answer(given, [GenerateRequest((1,), 0, 2)])


def test_an_answer_that_ended_has_its_end_token_and_a_cut_one_has_none():
    """SGLang tells which token, or which text, it ended at; without the token nothing teaches the policy to end."""
    ended, kept_back, at_text, cut = (answer(tokens, [-1.0] * 2) for tokens in ([3, 9], [3, 4], [3, 4], [3, 4]))
    for told, reason in (
        (ended, {"type": "stop", "matched": 9}),
        (kept_back, {"type": "stop", "matched": 9}),
        (at_text, {"type": "stop", "matched": "4"}),
        (cut, {"type": "length", "length": 2}),
    ):
        told["meta_info"]["finish_reason"] = reason
    found = parse_generate_answer([ended, at_text, cut], [GenerateRequest((1,), 0, 2)] * 3)
    assert [result.output_ids for result in found] == [(3, 9), (3, 4), (3, 4)]
    with pytest.raises(ValueError, match="end token 9 is not in the answer at place 1"):
        parse_generate_answer([ended, kept_back], [GenerateRequest((1,), 0, 2)] * 2)
