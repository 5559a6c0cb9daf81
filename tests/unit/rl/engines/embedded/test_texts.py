import pytest

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.engines.embedded.requests import RequestError
from posttrain.rl.engines.embedded.texts import Texts, cut_at


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(256).save_pretrained(folder)
    return Texts(folder)


def test_a_stop_is_found_wherever_it_ends_and_only_then(texts):
    found = texts.stopping_at(["q:", "<|user|>"])
    tokens = texts.encode("a long way to\nq: 3")
    reached = [found(tokens[:end]) for end in range(1, len(tokens) + 1)]
    place = len("a long way to\nq:")
    assert reached[: place - 1] == [""] * (place - 1)
    assert reached[place - 1] == "q:"
    assert found(texts.encode("a<|user|>")) == "<|user|>"


def test_special_tokens_show_where_they_are_spelled_and_not_in_an_answer(texts):
    tokens = texts.encode("3141<|user|>")
    assert (texts.answer(tokens), texts.spelled(tokens)) == ("3141", "3141<|user|>")


def test_a_text_is_cut_at_the_first_of_its_stops():
    assert cut_at("one two three", ["three", "two"]) == "one "
    assert cut_at("one", ["two"]) == "one"


def test_what_a_template_refuses_is_told(texts):
    with pytest.raises(RequestError, match="unknown role: judge"):
        texts.render([{"role": "judge", "content": "a"}], None, {})
