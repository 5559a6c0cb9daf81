"""Can a checkpoint's tokenizer be trained with? Asked when the patched copy is made, before anything is converted."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from posttrain.config.model_files import TOKENIZER, TOKENIZER_CONFIG
from posttrain.errors import Problem
from posttrain.rl.data.chat import load_tokenizer
from posttrain.rl.data.sandboxed_child import confined

log = logging.getLogger(__name__)

# Letters, digits, spaces, punctuation, contractions, scripts: what pre-tokenizers and normalizers treat apart.
PROBES = ("Hello, world! It's 12345 + 6.7\n\n  def f(x):\treturn x\n", "  Größe  中文English混合 Привет 🙂 ", "abc 0")
# Limits far beyond the files of any released model.
SECONDS, NUM_BYTES, MOST_CHARACTERS = 120.0, 8 << 30, 1_000_000
CONVERSATION = [{"role": "user", "content": "Hello"}]
_REMEDY = f"set model.tokenizer to a folder with a {TOKENIZER} of this vocabulary"


def check_tokenizer(folder: Path, vocab_size: int) -> list[Problem]:
    """Return why a tokenizer does not load, is not the one that its files describe, or renders without end.

    The files are somebody else's: they are read in a process of their own. A chat template may be missing, or reject
    the conversation that is tried: only what renders prompts needs one, and says so.

    Args:
        folder: A checkpoint in Hub layout.
        vocab_size: Rows of the model's embedding.
    """
    try:
        found = confined(lambda: [*map(dataclasses.asdict, _problems(folder, vocab_size))], SECONDS, NUM_BYTES)
        return [Problem(**problem) for problem in found]
    except (TimeoutError, MemoryError, ChildProcessError) as error:
        allowed = (
            f"files that are read, and render a short conversation, in {SECONDS:g} s and {NUM_BYTES / 2**30:g} GiB"
        )
        remedy = f"{_REMEDY}, or model.chat_template to a file, whichever it is"
        return [Problem("tokenizer-too-slow", "tokenizer", f"{_names(folder)}: {error}", allowed, remedy)]


def _problems(folder: Path, vocab_size: int) -> Iterator[Problem]:
    try:
        tokenizer = load_tokenizer(folder)
        problems = [*_check_encoding(tokenizer, folder, vocab_size)]
    except MemoryError:
        raise
    # Whatever the library makes of the files is a problem of theirs; its panics are no `Exception`.
    except BaseException as error:
        value = f"{_names(folder)}: {type(error).__name__}: {error}"
        allowed = "a tokenizer that loads without code of its own, and reads texts"
        yield Problem("tokenizer-unloadable", "tokenizer", value, allowed, _REMEDY)
        return
    yield from problems
    if tokenizer.chat_template:
        yield from _check_template(tokenizer)


def _check_encoding(tokenizer: PreTrainedTokenizerBase, folder: Path, vocab_size: int) -> Iterator[Problem]:
    if (folder / TOKENIZER).exists():
        plain = Tokenizer.from_file(str(folder / TOKENIZER))
        differing = [text for text in PROBES if tokenizer.encode(text, add_special_tokens=False) != _plain(plain, text)]
        if differing:
            value = f"{type(tokenizer).__name__}, which encodes {differing[0]!r} differently"
            allowed = f"a class that follows {TOKENIZER}"
            yield Problem("tokenizer-ambiguous", f"{TOKENIZER_CONFIG}: tokenizer_class", value, allowed, _REMEDY)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        allowed = f"ids below {vocab_size} (vocab_size)"
        yield Problem("token-id-outside-vocabulary", "tokenizer", f"token id {largest}", allowed, _REMEDY)


def _check_template(tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
    remedy = "set model.chat_template to a file with the Jinja template that the model was trained with"
    try:
        text = str(tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True))
    except (SecurityError, TemplateSyntaxError) as error:
        allowed = "a template of Jinja that stays in its sandbox"
        yield Problem("template-fails", "chat template", f"{type(error).__name__}: {error}", allowed, remedy)
    except MemoryError:
        raise
    except Exception as error:  # a template is somebody's program; it may take no such conversation
        log.info("the chat template does not render %s: %s", CONVERSATION, error)
    else:
        if len(text) > MOST_CHARACTERS:
            value, allowed = f"{len(text):,} characters for one message", f"at most {MOST_CHARACTERS:,}"
            yield Problem("template-endless", "chat template", value, allowed, remedy)


def _names(folder: Path) -> str:
    names = [path.name for path in sorted(folder.iterdir()) if "token" in path.name or path.name.startswith("vocab")]
    return ", ".join([*names, *(path.name for path in folder.glob("chat_template*"))]) or "no file"


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
