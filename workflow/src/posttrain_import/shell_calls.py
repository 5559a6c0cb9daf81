"""Finds the commands of a launch script that start the training, and their words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from posttrain_import.script import FLAG, PROGRAM, Word

SHELLS = {"bash", "sh", "dash", "zsh"}
_PYTHON = re.compile(r"(python|pypy)[\d.]*$")
# Programs that start the program in their words.
STARTERS = {
    *("torchrun", "accelerate", "deepspeed", "ray", "srun", "sbatch", "mpirun", "mpiexec", "nohup", "env", "timeout"),
    *("sudo", "su", "nice", "ionice", "numactl", "taskset", "stdbuf", "setsid", "conda", "micromamba", "uv", "poetry"),
    *("pipenv", "singularity", "apptainer", "docker", "podman", "kubectl", "ssh", "pdsh", "clush", "tmux", "screen"),
    *("xargs", "parallel", "nsys", "ncu", "strace", "gdb", "watch", "script", "unbuffer", "chroot", "doas", "modal"),
}
# Programs that mention a program without starting it.
_MENTIONS = {
    *("pkill", "pgrep", "kill", "killall", "ps", "cp", "mv", "rm", "ln", "ls", "cat", "head", "tail", "less", "more"),
    *("echo", "printf", "grep", "egrep", "rg", "sed", "awk", "find", "wc", "chmod", "chown", "touch", "git", "scp"),
    *("rsync", "tar", "zip", "diff", "cmp", "md5sum", "sha256sum", "stat", "file", "vim", "nano", "tee", "logger"),
    *("black", "ruff", "flake8", "mypy", "pylint", "wget", "curl", "dirname", "basename", "mkdir", "pip", "date"),
}
# Names that cannot be functions of an unread script.
KNOWN = {*SHELLS, *STARTERS, *_MENTIONS, "python", "python3"}


def unclear_call(text: str, place: str, why: str) -> list[Word] | None:
    """Return the flags of a text that cannot be parsed, if it may start the training."""
    if not re.search(r"train\w*\.py|\$|\balias\b", re.sub(r"\$\([^()]*\)", "", text)):
        return None
    file, _, line = place.rpartition(":")
    rows = enumerate(text.splitlines(), int(line))
    found = [Word(name, f"{file}:{number}", why) for number, row in rows for name in FLAG.findall(row)]
    return [Word("$", place, why, True), *found]


def found_call(words: Sequence[Word], follow: Callable[[Word, Sequence[Word]], None]) -> list[Word] | None:
    """Return the words that a command passes to the training; None if it does not start it.

    Args:
        words: Words of the command.
        follow: Called with a word that is a script, and the words after it.
    """
    texts = [word.text for word in words]
    name = texts[0].rpartition("/")[2]
    is_python, is_open = bool(_PYTHON.match(name)), bool(words[0].why)
    is_starter = is_python or is_open or name in STARTERS or name in SHELLS
    if name in _MENTIONS:
        return None
    for at, text in enumerate(texts):
        is_shell = text.rpartition("/")[2] in SHELLS and is_starter
        if is_shell and re.fullmatch(r"-\w*c", "".join(texts[at + 1 : at + 2])) and len(words) > at + 2:
            follow(words[at + 2], words[at + 4 :])
            return None
        if PROGRAM.search(text):
            is_wrapped = is_python and any(re.search(r"\w\.py$", other) for other in texts[1:at])
            if is_wrapped or not (is_starter or at == 0):
                return _doubted(words[at + 1 :], f"whether {texts[1] if is_wrapped else name} starts the training")
            more = [Word("$", words[0].place, f"{name} adds words", True)] if name in ("xargs", "parallel") else []
            return [*words[at + 1 :], *more]
        if is_starter and not words[at].why and re.search(r"\s", text) and re.search(r"train(_async)?\.py", text):
            follow(words[at], ())
            return None
    first = next((word for word in words[:3] if word.why and not FLAG.match(word.text)), None)
    if name in SHELLS and len(words) == 1:
        return unclear_call("train.py", words[0].place, "the script that is given is not known")
    if (is_python or is_open) and first and re.search(r"(\$\w+|[\"})])(\.py)?$", first.text):
        return _doubted(words[1:], f"whether {first.text} is the training")
    return None


def _doubted(words: Sequence[Word], what: str) -> list[Word] | None:
    found = [replace(word, why=word.why or f"{what} is not known") for word in words]
    return found if any(FLAG.match(word.text) for word in words) else None
