"""The tokenizer and chat template of the tiny model: one token per character, GLM's control tokens, GLM's template.

The vocabulary has 64 tokens. For a task with long prompts, it also has tokens for the text common to all prompts and
for frequent words, instead of unused characters. As in GLM-5 the control tokens follow the text tokens, so that none
has id 0, and a response ends with one of three tokens: the end of text, or the start of another role's turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

CHARACTERS = tuple("\n abcdefghijklmnopqrstuvwxyz0123456789.,:;?!+-*/=()")
UNKNOWN = "<|unk|>"
END_OF_TEXT = "<|endoftext|>"
CONTROL_TOKENS = (
    UNKNOWN,
    END_OF_TEXT,
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
)
STOP_TOKENS = (END_OF_TEXT, "<|user|>", "<|observation|>")
NUM_TOKENS = len(CHARACTERS) + len(CONTROL_TOKENS)
# A word in a smaller share of prompts is spelled.
_COMMON_WORD_SHARE = 0.1


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a generated tokenizer, besides the control tokens.

    Args:
        characters: Characters with one token each.
        pieces: Longer texts with one token each, wherever they occur.
    """

    characters: tuple[str, ...] = CHARACTERS
    pieces: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts, in the order of their tokens."""
        return (*self.characters, *self.pieces)


DIGITS = Vocabulary()
# A call of the calculator, up to its expression and from there on: one token each.
CALL, CALL_END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
ARITHMETIC = Vocabulary(pieces=(CALL, CALL_END))


def calculation(expression: str, value: str) -> tuple[str, str, str]:
    """Return a conversation in which a calculator is called: the call, what is read of the result, and the answer."""
    return f"{CALL}{expression}{CALL_END}<|observation|>", f"\n{value}<|assistant|>\n", f"{value}{END_OF_TEXT}"


def vocabulary_of(prompts: Sequence[str], answers: Sequence[str], num_tokens: int = NUM_TOKENS) -> Vocabulary:
    """Return the vocabulary of a task.

    Args:
        prompts: A large sample of the task's prompts.
        answers: Their answers.
        num_tokens: Size with the control tokens, unless the task needs more.

    Example:
        For "Add: 12 and 3!" and "Add: 5 and 60!": "Add: ", "!" and "and" are one token each.
    """
    first = _beginning(prompts)
    middles = [prompt[len(first) :] for prompt in prompts]
    last = _beginning([middle[::-1] for middle in middles])[::-1]
    middles = [middle[: len(middle) - len(last)] for middle in middles]
    counts = Counter(word for middle in middles for word in set(re.findall(r"[A-Za-z]{2,}", middle)))
    words = sorted(word for word, count in counts.items() if count >= _COMMON_WORD_SHARE * len(prompts))
    pieces = tuple(text for text in (first, last, *words) if len(text) > 1)
    left = re.compile("|".join(map(re.escape, sorted(pieces, key=len, reverse=True))) or "(?!)")
    # The chat template needs a line break.
    needed = sorted({"\n"}.union(*(left.sub("", text) for text in (*prompts, *answers))))
    room = max(len(needed), num_tokens - len(CONTROL_TOKENS) - len(pieces))
    return Vocabulary(tuple(dict.fromkeys([*needed, *CHARACTERS]))[:room], pieces)


def _beginning(texts: Sequence[str]) -> str:
    """Return the longest common prefix, which is that of the first and the last text in sorted order."""
    least, most = min(texts), max(texts)
    length = next((place for place, one in enumerate(least) if most[place : place + 1] != one), len(least))
    return least[:length]


CHAT_TEMPLATE = """[gMASK]<sop>
{%- for message in messages %}
{%- if message.role == 'system' %}<|system|>
{{ message.content }}
{%- elif message.role == 'user' %}<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' %}<|assistant|>
{{ message.content }}
{%- elif message.role == 'tool' %}<|observation|>
{{ message.content }}
{%- else %}{{ raise_exception('unknown role: ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


def make_tokenizer(max_length: int, known: Vocabulary = DIGITS) -> PreTrainedTokenizerFast:
    """Build the tokenizer.

    Args:
        max_length: The model's maximum sequence length.
        known: Vocabulary.

    Example:
        A system text of 16 characters and a user text of 4 become 28 tokens: [gMASK] <sop>, three role tokens with a
        line break each, and the 20 characters.
    """
    vocabulary = {token: i for i, token in enumerate((*known.texts, *CONTROL_TOKENS))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in known.pieces])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **_settings(max_length),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _settings(max_length: int) -> dict[str, Any]:
    """Return what both tokenizers tell transformers."""
    return {
        "unk_token": UNKNOWN,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "extra_special_tokens": [token for token in CONTROL_TOKENS if token not in (UNKNOWN, END_OF_TEXT)],
        "model_max_length": max_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }


def make_byte_level_tokenizer(max_length: int, known: Vocabulary = DIGITS) -> PreTrainedTokenizerFast:
    """Build the tokenizer of Qwen3.5, with the same ids.

    transformers takes its own class for this family, whatever tokenizer_config.json names. That class spells texts
    bytewise, so a space is "Ġ" in the vocabulary, and leaves out what it does not know.

    Args:
        max_length: The model's maximum sequence length.
        known: Vocabulary; its characters are ASCII.
    """
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = ["".join(piece for piece, _ in spelling.pre_tokenize_str(text)) for text in known.characters]
    tokenizer = Qwen3_5Tokenizer(
        vocab={token: i for i, token in enumerate((*spelled, *known.pieces, *CONTROL_TOKENS))},
        merges=[],
        **_settings(max_length),
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in known.pieces])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def stop_token_ids(known: Vocabulary = DIGITS) -> list[int]:
    """Return the ids of the tokens that end a response, end of text first."""
    return [len(known.texts) + CONTROL_TOKENS.index(token) for token in STOP_TOKENS]
