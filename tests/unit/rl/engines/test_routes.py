"""Experts as engines tell them."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
from tests.support.replayed_routes import draw
from tests.support.tiny_checkpoint import TRAINED

from posttrain.rl.engines.responses import GenerateRequest, generate_body, parse_generate_answer
from posttrain.rl.engines.routes import PREFILLED, TOLD, RoutesLayout, read_behind_json
from posttrain_weights.routed_experts import behind_json

LAYOUT, PROMPT, TOKENS = RoutesLayout.of(TRAINED), 4, 9
FIRST = TRAINED.first_k_dense_replace


def whole(num_tokens: int = TOKENS - 1, seed: int = 0) -> np.ndarray:
    """Return routes as engines have them, with zeros in layers without experts."""
    routes = np.zeros((num_tokens, TRAINED.num_hidden_layers, TRAINED.num_experts_per_tok), np.uint8)
    routes[:, FIRST:] = draw(np.random.default_rng(seed), TRAINED, num_tokens)
    return routes


def text(routes: np.ndarray) -> str:
    return base64.b64encode(routes.tobytes()).decode()


def answer_with(*told: str | None) -> list[dict]:
    metas = [{"id": str(number)} | ({TOLD: it} if it is not None else {}) for number, it in enumerate(told)]
    return [{"text": "", "meta_info": meta} for meta in metas]


def as_json(content: object) -> bytes:
    return json.dumps(content).encode()


@pytest.mark.parametrize("is_batch", [True, False])
def test_bytes_behind_an_answer_are_the_routes_that_stood_in_it(is_batch: bool) -> None:
    routes = [whole(seed=seed) for seed in range(3 if is_batch else 1)]
    answer = answer_with(*map(text, routes))
    body = behind_json(answer if is_batch else answer[0], as_json)
    assert len(body) < sum(routes_.nbytes for routes_ in routes) + 100 * len(routes)
    read = read_behind_json(body)
    items = read if is_batch else [read]
    assert [item["meta_info"]["id"] for item in items] == [str(number) for number in range(len(routes))]
    for item, expected in zip(items, routes, strict=True):
        assert np.array_equal(LAYOUT.read(item["meta_info"], PROMPT, TOKENS), expected[:, FIRST:])


def test_an_answer_that_tells_of_no_experts_stays_as_it_is() -> None:
    assert behind_json(answer_with(None, None), as_json) == b""
    assert behind_json({"text": ""}, as_json) == b""
    one, other = read_behind_json(behind_json(answer_with(text(whole()), None), as_json))
    assert len(one["meta_info"][TOLD]) == whole().nbytes
    with pytest.raises(ValueError, match="0 bytes of routed_experts"):
        LAYOUT.read(other["meta_info"], PROMPT, TOKENS)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda body: body[:-1], "bytes instead of"),
        (lambda body: body + b"0", "bytes instead of"),
        (lambda body: body[:4], "Expecting value"),
        (lambda body: (2).to_bytes(8, "little") + b"[7]"[:2] + body, "Expecting value|Expecting ','"),
        (lambda body: (3).to_bytes(8, "little") + b"[7]", "are not told of"),
        (lambda body: (2).to_bytes(8, "little") + b"{}", "are not told of"),
    ],
)
def test_an_answer_with_other_bytes_behind_it_is_refused(spoil: Callable[[bytes], bytes], said: str) -> None:
    body = behind_json(answer_with(text(whole())), as_json)
    with pytest.raises(ValueError, match=said):
        read_behind_json(spoil(body))


def test_layers_without_experts_are_left_out() -> None:
    found = LAYOUT.read({TOLD: text(whole())}, PROMPT, TOKENS)
    assert np.array_equal(found, whole()[:, FIRST:])
    assert found.dtype == np.uint8


def test_more_experts_than_a_byte_has_numbers_take_two() -> None:
    """Also of a response that names none beyond them, of which an engine tells in single bytes."""
    many = dataclasses.replace(LAYOUT, num_experts=384)
    assert many.read({TOLD: text(whole())}, PROMPT, TOKENS).dtype == np.int16
    far = whole().astype("<i2")
    far[3, FIRST, 0] = 383
    assert np.array_equal(many.read({TOLD: text(far)}, PROMPT, TOKENS), far[:, FIRST:])


def test_what_a_prompt_went_through_is_told_by_who_has_prefilled_it() -> None:
    prefilled, decoded = whole(PROMPT, seed=1), whole()
    decoded[:PROMPT] = 0
    found = LAYOUT.read({TOLD: text(decoded), PREFILLED: text(prefilled)}, PROMPT, TOKENS)
    assert np.array_equal(found, np.concatenate([prefilled, decoded[PROMPT:]])[:, FIRST:])


def test_a_response_of_one_token_has_only_been_prefilled() -> None:
    prefilled = whole(PROMPT, seed=1)
    assert np.array_equal(LAYOUT.read({PREFILLED: text(prefilled)}, PROMPT, PROMPT + 1), prefilled[:, FIRST:])


def changed(place: tuple[int, ...], value: int) -> dict[str, str]:
    routes = whole()
    routes[place] = value
    return {TOLD: text(routes)}


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({}, "no routed_experts"),
        ({TOLD: None}, "no routed_experts"),
        ({TOLD: "AAA"}, "no routed_experts"),
        ({TOLD: text(whole(TOKENS))}, "bytes of routed_experts for"),
        ({TOLD: text(whole().astype(np.int32))}, "bytes of routed_experts for"),
        ({TOLD: text(whole().astype("<i2"))}, "bytes of routed_experts for"),
        (changed((2, FIRST, 1), TRAINED.n_routed_experts), f"sent to expert {TRAINED.n_routed_experts} of"),
        (changed((2, FIRST), 0), "twice to the same expert"),
        ({TOLD: text(whole()), PREFILLED: text(whole(PROMPT + 1))}, "bytes of prefill_routed_experts for"),
        ({TOLD: text(whole()), PREFILLED: None}, "no prefill_routed_experts"),
    ],
)
def test_what_cannot_be_is_refused(meta: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LAYOUT.read(meta, PROMPT, TOKENS)


def test_a_request_asks_for_them_and_its_result_has_them() -> None:
    request = GenerateRequest((1, 2, 3, 4), 0, 8, routes=LAYOUT)
    assert generate_body([request])["return_routed_experts"] is True
    assert "return_routed_experts" not in generate_body([GenerateRequest((1,), 0, 8)])
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None]] * 5, "weight_version": "1"}
    (result,) = parse_generate_answer([{"meta_info": {**meta, TOLD: text(whole())}}], [request])
    assert result.routes is not None
    assert np.array_equal(result.routes, whole()[:, FIRST:])
    with pytest.raises(ValueError, match=r"no routed_experts in the answer: .*, at place 0"):
        parse_generate_answer([{"meta_info": meta}], [request])
