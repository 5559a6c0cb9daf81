import pytest
from transformers import AutoTokenizer

from posttrain.checkpoint.tiny.tokenizer import CHARACTERS, CONTROL_TOKENS, NUM_TOKENS, make_tokenizer, stop_token_ids
from posttrain.planner.sizing.made_model import SMALLEST_VOCABULARY


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(256).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_one_token_per_character_and_control_token(tokenizer):
    assert len(tokenizer) == NUM_TOKENS == SMALLEST_VOCABULARY
    for i, token in enumerate((*CHARACTERS, *CONTROL_TOKENS)):
        assert tokenizer.convert_tokens_to_ids(token) == i
    text = "[gMASK]<sop><|user|>\n3141, is it?<|assistant|>"
    assert len(tokenizer.encode(text)) == 4 + len("\n3141, is it?")


@pytest.mark.parametrize("text", ["3141", " 1 2\n3 ", "a.b,c:d;e?f!g+h-i*j/k=l(m)", ""])
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_it_does_not_know_is_one_token(tokenizer):
    unknown = tokenizer.unk_token_id
    assert tokenizer.encode("1é2") == [
        tokenizer.convert_tokens_to_ids("1"),
        unknown,
        tokenizer.convert_tokens_to_ids("2"),
    ]


def test_stop_tokens(tokenizer):
    stops = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert stop_token_ids() == stops
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == stops[0]
    assert min(stops) > 0


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="unknown role: judge"):
        tokenizer.apply_chat_template([{"role": "judge", "content": "1"}])
