"""The flags of a slime or miles launch script with values and lines, for bash and Python.

A script is parsed, not run. Values that only a run would determine (a command's output, an unset variable, a branch)
are unknown, with a reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.errors import ConfigError, Problem

# Launchers take a page or two; larger scripts are rejected.
MOST_BYTES = 2**17
MOST_CHARACTERS = 2**16
MOST_WORDS = 10_000
# Limit of words and characters that are assembled in parsing; ten times what real launchers need.
MOST_STEPS = 500_000
UNSET = "the script does not set"
FLAG = re.compile(r"--[A-Za-z][\w-]*")
# Name of the training program in both projects.
PROGRAM = re.compile(r"(^|/)train(_async)?\.py$")


@dataclass(frozen=True)
class Word:
    """One word of a command.

    Args:
        text: Its text after expansion; if unknown, as spelled in the script.
        place: File and line.
        why: Why it is unknown; "" if it is known.
        is_list: It may expand to any number of words, including flags.
        is_split: It may expand to any number of words; right after a flag, it is the flag's value.
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
        name: Name with its dashes.
        values: Words after it.
        place: File and line.
        why: Why its value is unknown; "" if it is known.
    """

    name: str
    values: tuple[str, ...]
    place: str
    why: str = ""


@dataclass(frozen=True)
class Script:
    """A launch script.

    Args:
        flags: Name -> flag; the last one wins, as in both projects' parsers.
        unread: Unknown words among the flags; their names are as spelled in the script.
    """

    flags: Mapping[str, Given]
    unread: tuple[Given, ...]


class Budget:
    """Limits the work for one script, for example for texts that double themselves."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def spend(self, steps: int) -> None:
        """Add steps.

        Raises:
            ConfigError: The limit is exceeded.
        """
        self._left -= steps
        if self._left < 0:
            raise too_much("it expands too far")


def too_much(reason: str) -> ConfigError:
    """Return the error for a script that needs more work than launch scripts do."""
    remedy = "give the script that starts the training, without what makes it long"
    return ConfigError([Problem("script-too-long", "the script", reason, "flags of one training", remedy)])


def flags_of(words: Iterable[Word], has_lists: bool = False) -> Script:
    """Return the flags among a command's words; the last of repeated flags wins.

    Args:
        words: Words after the program.
        has_lists: An unknown list may repeat any flag, including earlier ones.
    """
    found: list[Given] = []
    # Why each flag itself may be absent.
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
            # If a flag is absent, its value belongs to the flag before it.
            at = len(found) - 1
            while at and reasons[at] and not word.why:
                at -= 1
                found[at] = replace(found[at], why=found[at].why or reasons[at + 1])
    return Script({given.name: given for given in found}, tuple(unread))


def merged(calls: Sequence[Sequence[Word]]) -> Script:
    """Return the flags on which all possible calls of the training agree."""
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
    """Yield (position of the first character, text as spelled, text without quotes) of each word of a command."""
    for match in re.finditer(r"""(?:"[^"]*"|'[^']*'|\S)+""", text):
        try:
            (plain,) = shlex.split(match[0]) or [""]
        except ValueError:
            plain = match[0]
        yield match.start(), match[0], plain


def read_text(path: Path) -> str:
    """Return a script's text.

    Raises:
        ConfigError: The path is not a text file, or too long for a script.
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
        raise ConfigError(
            [Problem("file-unreadable", str(path), reason, "a launch script: text, not large", remedy)]
        ) from None
    return text.replace("\r\n", "\n")
