"""The tokenizer and chat template of the tiny model: one token per character, GLM's control tokens, GLM's template.

64 tokens in all. As in GLM-5 the control tokens come after the text, so that no id of theirs is 0, and a response ends
with any of three tokens: the end of text, or the start of somebody else's turn.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

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


def make_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer.

    Args:
        max_length: Longest sequence the model was made for.

    Example:
        A system text of 16 characters and a user text of 4 become 28 tokens: [gMASK] <sop>, three role tokens with a
        line break each, and the 20 characters.
    """
    vocabulary = {token: i for i, token in enumerate((*CHARACTERS, *CONTROL_TOKENS))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNKNOWN,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[token for token in CONTROL_TOKENS if token not in (UNKNOWN, END_OF_TEXT)],
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def stop_token_ids() -> list[int]:
    """Return the ids of the tokens that end a response, the end of text first."""
    return [len(CHARACTERS) + CONTROL_TOKENS.index(token) for token in STOP_TOKENS]
