"""The flags of a launch script of slime or miles with values and lines, for bash and Python alike.

A script is read, never run. What only running it would tell (a command's output, a variable that it does not set, a
branch) is kept as unknown, with the reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.errors import ConfigError, Problem

# A launcher is a page or two; a script that makes more of itself is not one.
MOST_BYTES = 2**17
MOST_CHARACTERS = 2**16
MOST_WORDS = 10_000
# Words and characters that are put together while it is read; launchers in the wild need a tenth.
MOST_STEPS = 500_000
UNSET = "the script does not set"
FLAG = re.compile(r"--[A-Za-z][\w-]*")
# What starts the training in both projects.
PROGRAM = re.compile(r"(^|/)train(_async)?\.py$")


@dataclass(frozen=True)
class Word:
    """One word of a command.

    Args:
        text: As the program would get it; as the script spells it where that is not known.
        place: Where it stands: file and line.
        why: Why it is not known; "" where it is.
        is_list: It stands for any number of words, some of which may be flags.
        is_split: It stands for any number of words, unless the flag before it has no value yet.
    """

    text: str
    place: str
    why: str = ""
    is_list: bool = False
    is_split: bool = False


@dataclass(frozen=True)
class Given:
    """One flag of the script.

    Args:
        name: With its dashes.
        values: What follows it.
        place: Where it stands: file and line.
        why: Why its value is not known; "" where it is.
    """

    name: str
    values: tuple[str, ...]
    place: str
    why: str = ""


@dataclass(frozen=True)
class Script:
    """A launch script.

    Args:
        flags: Name -> flag; of one that is given twice the last, as the parsers of both projects do it.
        unread: What stands among the flags and is not known; its name is as the script spells it.
    """

    flags: Mapping[str, Given]
    unread: tuple[Given, ...]


class Budget:
    """What may be made of one script: texts that double themselves are ended."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def spend(self, steps: int) -> None:
        """Count steps.

        Raises:
            ConfigError: There were too many.
        """
        self._left -= steps
        if self._left < 0:
            raise too_much("it makes too much of itself")


def too_much(reason: str) -> ConfigError:
    """Return the error of a script that is more work than launch scripts are."""
    remedy = "give the script that starts the training, without what makes it long"
    return ConfigError([Problem("the script", reason, "flags of one training", remedy)])


def flags_of(words: Iterable[Word], has_lists: bool = False) -> Script:
    """Return the flags among the words of a command; of one that is given twice the last counts.

    Args:
        words: Behind the program.
        has_lists: A list that is not known may hold any flag, those that stand before it, too.
    """
    found: list[Given] = []
    # Why a flag itself need not be there.
    reasons: list[str] = []
    unread: list[Given] = []
    for word in words:
        name, equals, value = word.text.partition("=")
        if FLAG.fullmatch(name):
            found.append(Given(name, (value,) if equals else (), word.place, word.why))
            reasons.append(word.why)
        elif word.is_list or (word.is_split and found and found[-1].values) or (word.why and not found):
            unread.append(Given(word.text, (), word.place, word.why))
            if has_lists and UNSET not in word.why:
                why = f"{word.text} in {word.place} may give it again: {word.why}"
                found = [replace(given, why=given.why or why) for given in found]
        elif found:
            found[-1] = replace(found[-1], values=(*found[-1].values, word.text), why=found[-1].why or word.why)
            # Where its flag is missing, a value belongs to the flag before that one.
            at = len(found) - 1
            while at and reasons[at] and not word.why:
                at -= 1
                found[at] = replace(found[at], why=found[at].why or reasons[at + 1])
    return Script({given.name: given for given in found}, tuple(unread))


def merged(calls: Sequence[Sequence[Word]]) -> Script:
    """Return the flags that all possible calls of the training agree on."""
    scripts = [flags_of(words, True) for words in calls]
    flags: dict[str, Given] = {}
    for script in scripts:
        for name, given in script.flags.items():
            others = [other.flags.get(name) for other in scripts]
            differs = any(other is None or other.values != given.values for other in others)
            why = next((other.why for other in others if other and other.why), "")
            if differs and not why:
                places = sorted({other.place for other in others if other})
                why = f"the script starts the training more than once, with other flags: {', '.join(places)}"
            flags.setdefault(name, replace(given, why=why))
    return Script(flags, tuple(dict.fromkeys(given for script in scripts for given in script.unread)))


def split_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (place of its first character, as it is spelled, without quotation marks) of each word of a command."""
    for match in re.finditer(r"""(?:"[^"]*"|'[^']*'|\S)+""", text):
        try:
            (plain,) = shlex.split(match[0]) or [""]
        except ValueError:
            plain = match[0]
        yield match.start(), match[0], plain


def read_text(path: Path) -> str:
    """Return a script's text.

    Raises:
        ConfigError: It is no file, no text, or too long for a script.
    """
    remedy = "give the path of a launch script of slime (bash) or miles (Python)"
    try:
        if not path.is_file():
            raise ValueError("no such file" if not path.exists() else "not a file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"longer than {MOST_BYTES} bytes")
        text = path.read_bytes().decode("utf-8")
        if "\0" in text:
            raise ValueError("it is binary")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError([Problem(str(path), reason, "a launch script: text, not large", remedy)]) from None
    return text.replace("\r\n", "\n")
