"""Which evaluation prompts the training data holds, whole or in part.

Texts are compared as words: case, punctuation and white space do not count. Two prompts overlap when they share 13
consecutive words; one that has fewer words must be the same as a whole. Thirteen is what GPT-3's authors compared by
(arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

NUM_WORDS = 13
# Words that more than one in so many prompts of a suite share are its template, not its question.
TEMPLATE_SHARE = 100
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Overlap:
    """Two prompts that share words.

    Args:
        suite: Of the evaluation prompt.
        place: Of the evaluation prompt in its suite.
        trained: Place of the first training prompt that shares them.
    """

    suite: str
    place: int
    trained: int


def find_overlaps(suites: Mapping[str, Sequence[str]], training: Iterable[str]) -> list[Overlap]:
    """Return every evaluation prompt that a training prompt overlaps with.

    Args:
        suites: Name -> its prompts.
        training: Prompts that are trained on; read once, in order.

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
    """Return which evaluation prompts have a key; those of a template have none."""
    owners: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for suite, texts in suites.items():
        keys = [set(_keys(_words(text))) for text in texts]
        counts = Counter(key for of_prompt in keys for key in of_prompt)
        most = max(1, len(texts) // TEMPLATE_SHARE)
        for place, of_prompt in enumerate(keys):
            # Of a prompt whose every word is the template's, the whole still tells.
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
