"""What a grader sees of an engine's response."""

from __future__ import annotations

import pytest

from posttrain.checkpoint.tiny.tokenizer import CHARACTERS, CONTROL_TOKENS, make_tokenizer
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.responses import GenerateResult
from posttrain.rl.reward.answer import Answer
from posttrain.rl.rollout.episode import Episode
from posttrain.rl.rollout.response_text import answer_of
from posttrain.types import Prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(256).save_pretrained(folder)
    return ChatTokenizer(folder)


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("is_text", [False, True])
def test_everything_that_is_known_of_the_row_and_the_response(
    tokenizer: ChatTokenizer, reason: str, is_text: bool
) -> None:
    message = {"role": "user", "content": "say 42"}
    prompt = Prompt(3, (message,), {"gold": "42"}, "sums", {"level": 2}, is_text=is_text)
    end = len(CHARACTERS) + CONTROL_TOKENS.index("<|user|>")
    tokens = (*map(CHARACTERS.index, "it is 42"), end)
    result = GenerateResult(tokens, (-0.5,) * len(tokens), reason, 1)
    assert answer_of(prompt, tokenizer, Episode.of_response((1, 2), result)) == Answer(
        text="it is 42",
        label={"gold": "42"},
        prompt=(message,),
        source="sums",
        columns={"level": 2},
        num_tokens=9,
        is_truncated=reason == "length",
        is_chat=not is_text,
    )
