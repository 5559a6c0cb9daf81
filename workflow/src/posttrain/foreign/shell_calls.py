"""Which commands of a launch script start the training, and with which words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.foreign.script import FLAG, PROGRAM, Word
from posttrain.foreign.shell_commands import script
from posttrain.foreign.shell_state import State
from posttrain.foreign.shell_tree import Code

if TYPE_CHECKING:
    from posttrain.foreign.shell import Shell

_SHELLS = {"bash", "sh", "dash", "zsh"}
_PYTHON = re.compile(r"(python|pypy)[\d.]*$")
# Programs that start the program that their words name.
_STARTERS = {
    *("torchrun", "accelerate", "deepspeed", "ray", "srun", "sbatch", "mpirun", "mpiexec", "nohup", "env", "timeout"),
    *("sudo", "su", "nice", "ionice", "numactl", "taskset", "stdbuf", "setsid", "conda", "micromamba", "uv", "poetry"),
    *("pipenv", "singularity", "apptainer", "docker", "podman", "kubectl", "ssh", "pdsh", "clush", "tmux", "screen"),
    *("xargs", "parallel", "nsys", "ncu", "strace", "gdb", "watch", "script", "unbuffer", "chroot", "doas", "modal"),
}
# Programs that name it without starting it.
_MENTIONS = {
    *("pkill", "pgrep", "kill", "killall", "ps", "cp", "mv", "rm", "ln", "ls", "cat", "head", "tail", "less", "more"),
    *("echo", "printf", "grep", "egrep", "rg", "sed", "awk", "find", "wc", "chmod", "chown", "touch", "git", "scp"),
    *("rsync", "tar", "zip", "diff", "cmp", "md5sum", "sha256sum", "stat", "file", "vim", "nano", "tee", "logger"),
    *("black", "ruff", "flake8", "mypy", "pylint", "true", "false", ":", "wget", "curl", "sleep", "dirname"),
    "basename",
}


class Calls:
    """The calls that are found.

    Args:
        shell: That finds them.
    """

    def __init__(self, shell: Shell):
        self._shell = shell
        self.found: list[list[Word]] = []

    def add(self, words: Sequence[Word]) -> None:
        """Keep the words behind the training's program."""
        self._shell.budget.spend(5 * len(words))
        if list(words) not in self.found:
            self.found.append(list(words))

    def unclear(self, text: str, file: str, line: int, why: str) -> None:
        """Keep the flags of a text that is not understood, if it may start the training."""
        if not re.search(r"train\w*\.py|\$|\balias\b", re.sub(r"\$\([^()]*\)", "", text)):
            return
        lines = enumerate(text.splitlines(), line)
        found = [(name, number) for number, row in lines for name in FLAG.findall(row)]
        self.add([Word("$", f"{file}:{line}", why, True), *(Word(name, f"{file}:{n}", why) for name, n in found)])

    def launched(self, words: Sequence[Word], state: State) -> None:
        """Look whether a command that is not run here starts the training."""
        texts = [word.text for word in words]
        name = texts[0].rpartition("/")[2]
        is_starter = name in _STARTERS or bool(_PYTHON.match(name)) or name in _SHELLS or bool(words[0].why)
        if name in _MENTIONS:
            return
        for at, text in enumerate(texts):
            shell = text.rpartition("/")[2] in _SHELLS and (at == 0 or is_starter)
            if shell and re.fullmatch(r"-\w*c", "".join(texts[at + 1 : at + 2])) and len(texts) > at + 2:
                self._script(words[at + 2], words[at + 3 :], state if name not in _STARTERS else State())
                return
            if PROGRAM.search(text):
                self._call(words, at, is_starter or at == 0, name)
                return
            if not words[at].why and re.search(r"\s", text) and re.search(r"train(_async)?\.py", text) and is_starter:
                self._script(words[at], (), State(), words[at + 1 :])
                return
        if (name in _SHELLS and len(words) > 1) or name.endswith(".sh"):
            at = 1 if name in _SHELLS else 0
            content, _ = script(self._shell, words[at], state)
            if content is not None:
                self._script(Word(content, words[at].place), words[at:], state)
            elif words[at].text.rpartition("/")[2] in self._shell.written:
                self.unclear("train.py", *self._where(words[0]), f"what {words[at].text} starts is not known")
            return
        if name in _SHELLS and len(words) == 1:
            self.unclear("train.py", *self._where(words[0]), "the script that is given is not known")
            return
        is_open = (_PYTHON.match(name) or words[0].why) and any(w.why and not FLAG.match(w.text) for w in words[:3])
        if is_open and any(FLAG.match(text) for text in texts[1:]):
            first = next(word for word in words if word.why)
            if not re.search(r"\w\.py$", first.text) and re.search(r"[\"})$]\w*$", first.text):
                why = f"whether {first.text} is the training is not known"
                self.add([_as_unknown(word, why) for word in words[1:]])

    def fed(self, command: Code, text: Code) -> None:
        """Name the flags of a text that a command reads, which may be a script."""
        name = command.text.split()[0].rpartition("/")[2]
        if name in _SHELLS or name in _STARTERS or _PYTHON.match(name):
            self.unclear(text.text, text.file, text.line, f"what {name} reads is not followed")

    def _where(self, word: Word) -> tuple[str, int]:
        file, _, line = word.place.rpartition(":")
        return file, int(line)

    def _call(self, words: Sequence[Word], at: int, is_started: bool, name: str) -> None:
        given = list(words[at + 1 :])
        texts = [word.text for word in words[1:at]]
        if _PYTHON.match(name) and any(re.search(r"\w\.py$", text) for text in texts):
            why = f"whether {texts[0]} starts the training is not known"
            self.add([_as_unknown(word, why) for word in given])
        elif not is_started:
            if any(FLAG.match(word.text) for word in given):
                self.add([_as_unknown(word, f"whether {name} starts the training is not known") for word in given])
        elif name in ("xargs", "parallel"):
            self.add([*given, Word("$", words[0].place, f"{name} adds words", True)])
        else:
            self.add(given)

    def _script(self, text: Word, given: Sequence[Word], state: State, more: Sequence[Word] = ()) -> None:
        """Follow a script that is a word of a command, in a shell of its own that has what is exported."""
        file, line = self._where(text)
        if text.why:
            self.unclear(text.text + " train.py", file, line, text.why)
            return
        inner = State(
            {name: variable for name, variable in state.variables.items() if "x" in variable.marks}, lost=state.lost
        )
        inner.assign_array("@", given[1:], False, any(word.why for word in given))
        before = len(self.found)
        self._shell.apart(text.text, text.place, inner)
        if more and len(self.found) > before:
            self.found[-1] += more


def _as_unknown(word: Word, why: str) -> Word:
    return Word(word.text, word.place, word.why or why, word.is_list)
