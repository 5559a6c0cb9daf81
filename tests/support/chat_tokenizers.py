"""Tokenizers of bytes and some merges, with the control tokens and the chat templates of public families.

The templates are the copies that TRL ships.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.rl.data.chat import ChatTokenizer


@dataclass(frozen=True)
class Family:
    """How a family's tokenizer ends turns.

    Args:
        template: Name of TRL's copy of its chat template.
        special: Control tokens.
        added: Tokens that are matched before any other, and are not special.
        stops: The tokens that end a response; the first one is the tokenizer's `eos_token`.
    """

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    stops: tuple[str, ...]


_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN3 = Family("qwen3", ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), _TOOLS, ("<|im_end|>", "<|endoftext|>"))
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_TOOLS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink", *_TOOLS)
GLM = Family(
    "glm4moe",
    ("<|endoftext|>", "[gMASK]", "<sop>", *_ROLES),
    _GLM_TOOLS,
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
)


def make_chat_tokenizer(folder: Path, family: Family) -> ChatTokenizer:
    """Write a tokenizer into a folder and return it.

    The two merges let a text have more than one sequence of tokens, as any real vocabulary does.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("4", "2")]
    vocabulary = {text: place for place, text in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.stops[0],
        pad_token="<|endoftext|>",
        chat_template=(files("trl") / "chat_templates" / f"{family.template}.jinja").read_text(),
    )
    tokenizer.save_pretrained(folder)
    stops = tokenizer.convert_tokens_to_ids([*family.stops])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return ChatTokenizer(folder)
