"""Can a checkpoint's tokenizer be trained with? Asked when the patched copy is made, before anything is converted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from posttrain.config.model_files import TOKENIZER, TOKENIZER_CONFIG
from posttrain.data.chat import load_tokenizer
from posttrain.errors import Problem

# Letters, digits, spaces, punctuation, contractions, scripts: what pre-tokenizers and normalizers treat apart.
PROBES = ("Hello, world! It's 12345 + 6.7\n\n  def f(x):\treturn x\n", "  Größe  中文English混合 Привет 🙂 ", "abc 0")
_REMEDY = f"set model.tokenizer to a folder with a {TOKENIZER} of this vocabulary"


def check_tokenizer(folder: Path, vocab_size: int) -> Iterator[Problem]:
    """Yield why a tokenizer does not load or is not the one that its files describe.

    A chat template may be missing: only what renders prompts needs one, and says so.

    Args:
        folder: A checkpoint in Hub layout.
        vocab_size: Rows of the model's embedding.
    """
    try:
        tokenizer = load_tokenizer(folder)
    # The files are not ours, so any exception of the library is reported as a problem of the files.
    except Exception as error:
        found = [
            path.name for path in sorted(folder.iterdir()) if "token" in path.name or path.name.startswith("vocab")
        ]
        value = f"{', '.join(found) or 'no file'}: {type(error).__name__}: {error}"
        yield Problem("tokenizer", value, "a tokenizer that loads without remote code", _REMEDY)
        return
    if (folder / TOKENIZER).exists():
        plain = Tokenizer.from_file(str(folder / TOKENIZER))
        differing = [text for text in PROBES if tokenizer.encode(text, add_special_tokens=False) != _plain(plain, text)]
        if differing:
            value = f"{type(tokenizer).__name__}, which encodes {differing[0]!r} differently"
            yield Problem(f"{TOKENIZER_CONFIG}: tokenizer_class", value, f"a class that obeys {TOKENIZER}", _REMEDY)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        yield Problem("tokenizer", f"token id {largest}", f"ids below {vocab_size} (vocab_size)", _REMEDY)


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
