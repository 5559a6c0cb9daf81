"""What can go wrong, and how it is reported.

Wrong input is a `Problem`: the key, its value, what is allowed and the remedy. Problems are collected and raised
once, so that a user can correct all of them in one go. `CheckpointError` is a checkpoint that is not what it should
be. Both are shown without a traceback (`posttrain.cli`), because the text alone says what to do. Failures of the
outside world (HTTP, a process) are `RuntimeError`s, those of disks the system's own `OSError`s, to which `explain`
adds what to do; an impossible state is an `assert`.

Each rejection has a code such as "unknown-key", which names the rule that was broken. Scripts and tests match codes;
sentences may change with every version. A code keeps its meaning, and belongs to one of the two classes
(`make docs` lists all).

Messages tell what others wrote: names of files and tensors, values, addresses. `printable` is what keeps that from
speaking to the user's terminal; all messages, the log and the pages go through it.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Control characters but tab and line break, halves of characters, and what makes text run the other way.
_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
# User and password of an address.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?:@[^/\s@]+)*@")


def printable(text: str) -> str:
    """Return a text with control characters named, not shown, and without the user and password of addresses.

    Example:
        A file called "a", ESC, "[2J" is told as "a\\x1b[2J"; "http://user:word@host/x" as "http://***@host/x".
    """
    named = _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return _CREDENTIALS.sub("***@", named)


def one_line(name: object) -> str:
    """Return a name that others chose as it may stand in a list: a line break in it begins no line of its own."""
    return printable(str(name)).replace("\n", "\\n")


def reason_of(error: BaseException) -> str:
    """Return in one line why something cannot be read; torch's text on a pickle goes on with how to let it run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    named = next((line for line in lines if "GLOBAL" in line), lines[0])
    return "it holds more than tensors and plain values" if named.startswith("Weights only load failed") else named


def with_code(text: str, code: str) -> str:
    """Return a message with its code in brackets at the end of the first line."""
    first, separator, rest = text.partition("\n")
    return f"{first} [{code}]{separator}{rest}"


@dataclass(frozen=True)
class Problem:
    """One wrong input.

    Args:
        code: The rule that was broken, in kebab case.
        key: Where the value comes from: a config key ("optimizer.lr"), a file, a tensor.
        value: What was found, as text.
        allowed: What would be accepted.
        remedy: What the user should do.
    """

    code: str
    key: str
    value: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        found = with_code(f"{self.key} = {self.value}", self.code)
        return f"{found}\n      allowed: {self.allowed}\n      remedy:  {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        """Return the problem as it stands in `plan.json`."""
        return asdict(self)


class ConfigError(ValueError):
    """The configuration is wrong; `problems` lists everything that is, not only the first.

    Args:
        problems: At least one.
        hint: Where to read more, at the end of the message.
    """

    def __init__(self, problems: Sequence[Problem], hint: str = ""):
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        self.hint = hint
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{count} in the configuration:", *(f"  - {problem}" for problem in problems)]
        super().__init__(printable("\n".join([*lines, hint] if hint else lines)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are pickled with their `args`, here one text, and processes send them to each other.
        return type(self), (self.problems, self.hint), self.__dict__


class CheckpointError(ValueError):
    """A checkpoint, shard or receipt is not as expected.

    Args:
        code: The rule that was broken, in kebab case.
        text: Names file, tensor and both sides.
    """

    def __init__(self, code: str, text: str):
        self.code = code
        self.text = printable(text)
        super().__init__(with_code(self.text, code))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.text), self.__dict__


def raise_if_any(problems: Sequence[Problem], hint: str = "") -> None:
    """Raise `ConfigError` when there is at least one problem."""
    if problems:
        raise ConfigError(problems, hint)


# ---- what the machine refuses ----

ELSEWHERE = "choose another folder: set='site.store=...', 'site.results=...' or 'site.node_local=...'"
AGAIN = "then run the same command again: what is finished is kept"
# What the system's number means for a user, and what to do.
REFUSALS: Mapping[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", f"free some space there, or {ELSEWHERE}; {AGAIN}"),
    errno.EDQUOT: ("your quota there is used up", f"`quota -s` shows it; free some space, or {ELSEWHERE}; {AGAIN}"),
    errno.EFBIG: ("the file is larger than files may be", f"raise the limit (`ulimit -f`), or {ELSEWHERE}; {AGAIN}"),
    errno.EROFS: ("the file system is read-only", f"have it mounted for writing, or {ELSEWHERE}; {AGAIN}"),
    errno.EACCES: ("permission denied", f"have its owner let you in (site.store_group shares a store), or {ELSEWHERE}"),
    errno.EPERM: ("not permitted", f"have its owner let you in (site.store_group shares a store), or {ELSEWHERE}"),
    errno.EMFILE: ("too many open files", f"raise the limit (`ulimit -n`, `ulimit -Hn`); {AGAIN}"),
    errno.ENFILE: ("too many open files on this machine", f"end what holds them; {AGAIN}"),
    errno.ELOOP: ("a link lies where a file of ours belongs", f"find out who put it there, and remove it; {AGAIN}"),
    errno.EIO: ("the disk, or the network file system, fails", f"look at the machine's log (`dmesg`); {AGAIN}"),
}
NO_INODES = "no file can be made there any more: its inodes are used up"
NO_INODES_REMEDY = f"delete files there, however small they are, or {ELSEWHERE}; {AGAIN}"


def explain(error: BaseException) -> str:
    """Tell why the machine refused to read or write, and what to do; "" when that is not what happened.

    Args:
        error: An `OSError`, or what was raised from one; its notes are shown, too.
    """
    refusal: BaseException | None = error
    while refusal is not None and not _is_refusal(refusal):
        refusal = refusal.__cause__
    if not isinstance(refusal, OSError) or refusal.errno is None:
        return ""
    what, remedy = REFUSALS[refusal.errno]
    if refusal.strerror and refusal.strerror != os.strerror(refusal.errno):
        what = refusal.strerror
    figures = list(getattr(refusal, "__notes__", ()))
    if refusal.filename is not None:
        place = _nearest(Path(os.fsdecode(refusal.filename)))
        if refusal.errno == errno.ENOSPC and lacks_inodes(place):
            what, remedy = NO_INODES, NO_INODES_REMEDY
        what = f"{refusal.filename}: {what}"
        figures += _FIGURES.get(refusal.errno, _nothing)(place)
    first = what if refusal is error else f"{error}\n  because: {what}"
    return "\n  ".join([first, *figures, f"remedy: {remedy}"])


def lacks_inodes(folder: Path) -> bool:
    """Return whether no file can be made there, however much room there is; some file systems do not count them."""
    status = os.statvfs(folder)
    return status.f_files > 0 and status.f_favail == 0


def _is_refusal(error: BaseException) -> bool:
    # A port may be refused, too: what names no file is no matter of permissions.
    is_about_permission = isinstance(error, PermissionError) and error.filename is None
    return isinstance(error, OSError) and error.errno in REFUSALS and not is_about_permission


def _nearest(path: Path) -> Path:
    """Return what exists of a path."""
    return next((parent for parent in (path, *path.absolute().parents) if os.path.exists(parent)), Path("/"))


def _nothing(place: Path) -> list[str]:
    return []


def _free(place: Path) -> list[str]:
    status = os.statvfs(place)
    num_bytes = status.f_bavail * status.f_frsize
    inodes = f", {status.f_favail} files" if status.f_files else ""
    return [f"free:   {num_bytes} bytes ({num_bytes / 2**30:.2f} GiB){inodes}"]


def _owner(place: Path) -> list[str]:
    status = os.stat(place)
    owner, group = _named(pwd.getpwuid, status.st_uid), _named(grp.getgrgid, status.st_gid)
    mode = f"{status.st_mode & 0o7777:04o}"
    return [f"{place} belongs to {owner}, group {group}, mode {mode}; this is {_named(pwd.getpwuid, os.geteuid())}"]


def _named(find: Callable[[int], Sequence[object]], number: int) -> str:
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


_FIGURES: Mapping[int, Callable[[Path], list[str]]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _free),
    **dict.fromkeys((errno.EACCES, errno.EPERM), _owner),
}
