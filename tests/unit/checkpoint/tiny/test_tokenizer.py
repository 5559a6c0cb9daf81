import json

import pytest
from transformers import AutoTokenizer

from posttrain.checkpoint.tiny.tokenizer import (
    CHARACTERS,
    CONTROL_TOKENS,
    DIGITS,
    NUM_TOKENS,
    STOP_TOKENS,
    make_byte_level_tokenizer,
    make_tokenizer,
    stop_token_ids,
    vocabulary_of,
)
from posttrain.plan.sizing.tiny_model import SMALLEST_VOCABULARY


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


PROMPTS = [
    f"Sort in {way} order: {a}.0, {b}.0\nAnswer as ['-69', '7'], please: [1]!"
    for way in ("ascending", "descending")
    for a in range(10, 20)
    for b in range(30, 35)
]


def test_a_task_has_tokens_of_what_its_prompts_have_in_common(tmp_path):
    known = vocabulary_of(PROMPTS, ["['12.0', '31.0']"])
    assert known.pieces == ("Sort in ", ".0\nAnswer as ['-69', '7'], please: [1]!", "ascending", "descending", "order")
    assert set("\n0123456789[]',. :") <= set(known.characters)
    make_tokenizer(256, known).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(known.texts) + len(CONTROL_TOKENS) == NUM_TOKENS
    for place, text in enumerate(known.texts):
        assert tokenizer.encode(text) == [place]
    assert PROMPTS[8].startswith("Sort in ascending order: 11.0, 33.0\n")
    # Both ends and both words, and " ", ": ", "11.0, 33" by characters.
    assert len(tokenizer.encode(PROMPTS[8])) == 4 + 1 + 2 + 8
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in (*PROMPTS, "['12.0', '31.0']"))
    assert tokenizer.convert_tokens_to_ids(list(STOP_TOKENS)) == stop_token_ids(known)


def test_rare_words_are_spelled_and_texts_without_anything_in_common_too():
    words = ["apple", "berry", "cherry"] * 5 + [f"{chr(97 + n % 26)}{chr(97 + n // 26)}z" for n in range(85)]
    known = vocabulary_of(words, words)
    assert known.pieces == ()
    assert known.characters[:27] == ("\n", *"abcdefghijklmnopqrstuvwxyz")
    assert len(known.texts) == len(CHARACTERS)


def test_more_characters_than_there_is_room_for_stay():
    texts = [chr(code) * 2 for code in range(0x4E00, 0x4E00 + 80)]
    known = vocabulary_of(texts, texts)
    assert set("".join(texts)) <= set(known.characters)


def test_the_byte_level_tokenizer_has_the_same_ids_and_transformers_class_keeps_them(tmp_path):
    """With the family's config.json beside it, whose class transformers takes whatever the file names."""
    known = vocabulary_of(["Add: 12 and 3!\n", "Add: 5 and 60!\n"], ["15", "65"], num_tokens=40)
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for vocabulary in (DIGITS, known):
        make_byte_level_tokenizer(256, vocabulary).save_pretrained(tmp_path)
        loaded, plain = AutoTokenizer.from_pretrained(tmp_path), make_tokenizer(256, vocabulary)
        assert type(loaded).__name__ == "Qwen3_5Tokenizer"
        text = "".join(vocabulary.characters) + "".join(vocabulary.pieces) + "<|user|>"
        assert loaded.encode(text) == plain.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
        messages = [{"role": "user", "content": vocabulary.characters[0] * 2}]
        said = [one.apply_chat_template(messages, return_dict=False) for one in (loaded, plain)]
        assert said[0] == said[1]
        assert (loaded.eos_token_id, loaded.pad_token_id) == (plain.eos_token_id, plain.pad_token_id)


def test_a_character_that_the_byte_level_tokenizer_does_not_know_is_left_out():
    tokenizer = make_byte_level_tokenizer(256)
    assert tokenizer.encode("1é2") == tokenizer.encode("12")
