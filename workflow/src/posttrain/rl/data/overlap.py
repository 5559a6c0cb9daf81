"""Finds evaluation prompts that the training data contains, in whole or in part.

Texts are compared as words, ignoring case, punctuation and white space. Two prompts overlap if they share 13
consecutive words, as in GPT-3's contamination analysis (arXiv 2005.14165, appendix C); shorter prompts must be equal.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

NUM_WORDS = 13
# Word sequences shared by more than one in this many prompts of a suite belong to its template, not to questions.
TEMPLATE_SHARE = 100
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Overlap:
    """Two prompts that share words.

    Args:
        suite: Suite of the evaluation prompt.
        place: Index of the evaluation prompt in its suite.
        trained: Index of the first overlapping training prompt.
    """

    suite: str
    place: int
    trained: int


def find_overlaps(suites: Mapping[str, Sequence[str]], training: Iterable[str]) -> list[Overlap]:
    """Return every evaluation prompt that a training prompt overlaps with.

    Args:
        suites: Name -> its prompts.
        training: Training prompts; iterated once, in order.

    Returns:
        Sorted by suite, in the order of `suites`, and place.

    Example:
        A suite of "What is 2 + 3?" and training prompts "what is 2+3" and "what is 2+4": the first is found.
    """
    owners = _owners(suites)
    found: dict[tuple[str, int], int] = {}
    for number, text in enumerate(training):
        for key in _keys(_words(text)):
            for owner in owners.get(key, ()):
                found.setdefault(owner, number)
    order = {name: place for place, name in enumerate(suites)}
    return [Overlap(*owner, found[owner]) for owner in sorted(found, key=lambda owner: (order[owner[0]], owner[1]))]


def _owners(suites: Mapping[str, Sequence[str]]) -> dict[int, list[tuple[str, int]]]:
    """Return key -> evaluation prompts, without keys that belong to a template."""
    owners: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for suite, texts in suites.items():
        keys = [set(_keys(_words(text))) for text in texts]
        counts = Counter(key for of_prompt in keys for key in of_prompt)
        most = max(1, len(texts) // TEMPLATE_SHARE)
        for place, of_prompt in enumerate(keys):
            # If all words of a prompt belong to the template, the whole text still identifies it.
            for key in of_prompt:
                if counts[key] <= most:
                    owners[key].append((suite, place))
            owners[_whole(_words(texts[place]))].append((suite, place))
    return owners


def _keys(words: Sequence[str]) -> Iterator[int]:
    """Yield a hash of the whole text and of each 13 consecutive words."""
    yield _whole(words)
    for start in range(len(words) - NUM_WORDS + 1):
        yield hash(tuple(words[start : start + NUM_WORDS]))


def _whole(words: Sequence[str]) -> int:
    return hash(("whole", *words))


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
