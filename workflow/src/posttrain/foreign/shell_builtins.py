"""Builtins of bash that change what is known; each takes the words of its command to the state after it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from posttrain.foreign.script import Word
from posttrain.foreign.shell_conditions import test
from posttrain.foreign.shell_state import State, Variable
from posttrain.foreign.shell_tree import Code, Misread, Unclear
from posttrain.foreign.shell_words import Words

if TYPE_CHECKING:
    from posttrain.foreign.shell import Shell

_NAME = re.compile(r"[A-Za-z_]\w*")
_OPTIONS = {"e": "errexit", "f": "noglob", "u": "nounset", "x": "xtrace", "a": "allexport", "o": "", "v": "verbose"}
_HARMLESS = {
    *("pipefail", "xtrace", "errexit", "noglob", "nounset", "verbose", "monitor", "errtrace", "functrace", "notify"),
    "allexport",
}
_SHOPTS = {
    *("nullglob", "globstar", "dotglob", "nocaseglob", "extglob", "expand_aliases", "checkwinsize", "lastpipe"),
    "nocasematch",
}
_SIGNALS = re.compile(r"(SIG)?(EXIT|INT|TERM|HUP|QUIT|USR1|USR2|PIPE|0|1|2|15)")
_MARKS = {"\\n": "\n", "\\t": "\t", "\\\\": "\\", "%%": "%"}
Builtin = Callable[["Shell", State, Sequence[Word], Code], State | None]


def _with_status(status: int | None) -> Builtin:
    def follow(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
        state.status = status
        return state

    return follow


def _echo(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    given = list(words[1:])
    end = "\n"
    while given and re.fullmatch(r"-[neE]+", given[0].text):
        end = "" if "n" in given[0].text else end
        if "e" in given.pop(0).text and any("\\" in word.text for word in given):
            state.output = None
    is_known = not any(word.why for word in given)
    state.write(" ".join(word.text for word in given) + end if is_known else None)
    state.status = 0
    return state


def _printf(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    given = list(words[1:])
    name = None
    if given[:1] and given[0].text == "-v":
        name, given = given[1] if len(given) > 1 else Word("", "", "it is not given"), given[2:]
    if given[:1] and given[0].text == "--":
        given = given[1:]
    text = _formatted(given)
    state.status = 0 if text is not None else None
    if name is None:
        state.write(text)
    elif name.why or not _NAME.fullmatch(name.text):
        raise Unclear(f"what printf -v {name.text} sets is not known")
    elif text is None:
        shell.forget(state, name.text, f"what printf sets in line {code.line} is not known")
    else:
        shell.assign(state, name.text, Word(text, code.place))
    return state


def _formatted(given: Sequence[Word]) -> str | None:
    """Return what printf makes of texts and whole numbers."""
    if not given or any(word.why for word in given):
        return None
    form, values = given[0].text, [word.text for word in given[1:]]
    if re.search(r"%(?!s|%|d|0?\d{1,3}d)|\\(?![nt\\])", form):
        return None
    found: list[str] = []
    is_first = True
    while is_first or values:
        is_first = False
        used = len(re.findall(r"%[^%]", form.replace("%%", "")))
        row = iter([*values[:used], *[""] * used])
        try:
            found += [_piece(match[0], row) for match in re.finditer(r"%%|%s|%0?\d*d|\\[nt\\]|[^%\\]+", form)]
        except ValueError:
            return None
        values = values[used:] if used else []
    return "".join(found)


def _piece(mark: str, row: Iterator[str]) -> str:
    if mark in _MARKS:
        return _MARKS[mark]
    if mark[0] != "%":
        return mark
    return next(row) if mark == "%s" else mark % int(next(row) or 0)


def _cat(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    text = None
    if len(words) == 1 and state.stdin is not None:
        text = "".join(state.stdin)
    elif len(words) == 2 and not words[1].why:
        text = state.files.get(os.path.normpath(words[1].text))
    state.write(text)
    state.stdin, state.status = (), None
    return state


def _read(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    names = [word for word in words[1:] if not word.text.startswith("-")]
    if [word.text for word in words[1:-1]] in (["-ra"], ["-r", "-a"], ["-a"]) and "IFS" not in state.variables:
        line = state.stdin[0] if state.stdin else "\\"
        if "\\" not in line and not words[-1].why and _NAME.fullmatch(words[-1].text):
            items = {at: Word(text, code.place) for at, text in enumerate(line.split())}
            state.variables[state.target(words[-1].text)] = Variable(items, True)
            state.stdin, state.status = (state.stdin or ())[1:], int(not line.endswith("\n"))
            return state
    options = [word.text for word in words[1:] if word.text.startswith("-")]
    is_known = state.stdin is not None and all(option == "-r" for option in options)
    if any(word.why or not _NAME.fullmatch(word.text) for word in names) or any(
        option not in ("-r", "-p", "-t", "-n", "-s", "-a", "-d", "-e", "-u", "-rs", "-rp") for option in options
    ):
        # A prompt or a number may stand among the names.
        names = [word for word in names if _NAME.fullmatch(word.text)]
        is_known = False
    if any(word.why for word in words[1:]):
        raise Unclear("what read sets is not known")
    if not is_known or state.stdin is None:
        for word in names or [Word("REPLY", "")]:
            shell.forget(state, word.text, f"line {code.line} reads it")
        state.status = state.stdin = None
        return state
    line, state.stdin = (state.stdin[0], state.stdin[1:]) if state.stdin else ("", ())
    state.status = int(not line.endswith("\n"))
    line = line.removesuffix("\n")
    blanks = state.get("IFS").items[0].text if "IFS" in state.variables and state.get("IFS").items else " \t\n"
    if ("\\" in line and "-r" not in options) or (blanks.strip(" \t\n") and len(blanks) > 1) or not blanks:
        pieces: list[str] | None = None
    elif blanks.strip(" \t\n"):
        pieces = line.split(blanks, max(len(names) - 1, 0))
        # One mark at the end closes the last field, it does not begin another.
        pieces = None if line.endswith(blanks) else pieces
    else:
        pieces = line.strip(" \t\n").split(None, max(len(names) - 1, 0))
    for number, word in enumerate(names or [Word("REPLY", "")]):
        if pieces is None or not names:
            shell.forget(state, word.text, f"line {code.line} reads it")
        else:
            shell.assign(state, word.text, Word(pieces[number] if number < len(pieces) else "", code.place))
    return state


def _mapfile(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    name = words[-1].text if len(words) > 1 else "MAPFILE"
    if words[-1].why or name.startswith("-"):
        raise Unclear("what mapfile sets is not known")
    if state.stdin is not None and [word.text for word in words[1:-1]] == ["-t"]:
        items = {number: Word(line.removesuffix("\n"), code.place) for number, line in enumerate(state.stdin)}
        state.variables[state.target(name)] = Variable(items, True)
    else:
        shell.forget(state, name, f"line {code.line} reads it")
    state.stdin, state.status = None, None
    return state


def _exit(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    state.status = _status(words, state)
    shell.exits.append(state)
    return None


def _return(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    if not state.locals and not shell.sources:
        # Outside of functions it is an error.
        state.status = 1
        return shell.checked(state)
    state.status = _status(words, state)
    shell.returns.append(state)
    return None


def _status(words: Sequence[Word], state: State) -> int | None:
    if len(words) < 2:
        return state.status
    return int(words[1].text) % 256 if not words[1].why and words[1].text.isdigit() else None


def _leave(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    count = words[1].text if len(words) > 1 and not words[1].why else "1"
    if not count.isdigit() or (len(words) > 1 and words[1].why):
        raise Unclear(f"how many loops {words[0].text} leaves is not known")
    state.status = 0
    if not shell.loops:
        return state
    loop = shell.loops[-min(int(count) or 1, len(shell.loops))]
    # What is between the two is left as well.
    (loop.breaks if words[0].text == "break" else loop.continues).append(state)
    return None


def _eval(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    text = " ".join(word.text for word in words[1:])
    if any(word.why for word in words[1:]):
        raise Unclear(f"what {text[:60]} evaluates is not known")
    shell.budget.spend(len(text))
    state.status = 0
    return shell.evaluate(text, code.place, state)


def _source(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    process = re.fullmatch(r"(?:source|\.)\s+<\((.*)\)", code.text, re.DOTALL)
    if process:
        text = shell.substitute(state.copy(), process[1], code.place)
        if text is None:
            raise Unclear("what it sources is the output of a command")
        return shell.evaluate(text, code.place, state)
    return shell.source(words[1:], state)


def _exec(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    given = list(words[1:])
    if not given:
        state.output = state.stdin = None
        state.status = 0
        return state
    shell.calls.launched(given, state)
    state.status = state.output = None
    shell.exits.append(state)
    return None


def _inner(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    """`command`, `builtin` and `time`: the command behind them."""
    given = list(words[1:])
    if given and given[0].text in ("-v", "-V"):
        state.status = state.output = None
        return state
    while given and given[0].text in ("-p", "--"):
        given.pop(0)
    if given and ("=" in given[0].text or given[0].text in ("!", "if", "for", "while", "(", "[[")):
        raise Unclear("a keyword behind it is not followed")
    if not given or words[0].text == "time" or given[0].text not in state.functions:
        return shell.call(given, state, code)
    # A function of this name is passed over.
    body = state.functions.pop(given[0].text)
    after = shell.call(given, state, code)
    if after:
        after.functions[given[0].text] = body
    return after


def _shift(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    count = words[1].text if len(words) > 1 else "1"
    if state.positional is None or not count.isdigit() or any(word.is_list for word in state.positional):
        state.positional, state.status = None, None
        return state
    state.status = int(int(count) > len(state.positional))
    if not state.status:
        state.positional = state.positional[int(count) :]
    return state


def _set(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    given, state.status = list(words[1:]), 0
    while given:
        word = given.pop(0)
        if word.why:
            raise Unclear("the options are not known")
        if word.text in ("--", "-") or word.text[:1] not in ("-", "+"):
            state.positional = given if word.text in ("--", "-") else [word, *given]
            break
        names = [_OPTIONS.get(letter, "?") for letter in word.text[1:] if letter != "o"]
        if "o" in word.text[1:] and given:
            names.append(given.pop(0).text)
        if not set(names) <= _HARMLESS:
            raise Misread(f"set {word.text} is not followed")
        state.options = state.options | set(names) if word.text[0] == "-" else state.options - set(names)
    return state


def _shopt(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    names = {word.text for word in words[1:] if not word.text.startswith("-")}
    if not names <= _SHOPTS:
        raise Misread("an option of shopt is not followed")
    state.options = state.options | names if any(word.text == "-s" for word in words) else state.options - names
    state.status = None
    return state


def _cd(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    state.options |= {"moved"}
    state.files = {name: text if name.startswith("alias ") else None for name, text in state.files.items()}
    state.status = state.output = None
    return state


def _trap(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    given = [word for word in words[1:] if word.text != "--"]
    state.status = 0
    if len(given) < 2 or given[0].text in ("", "-"):
        return state
    if any(word.why for word in given):
        raise Unclear("what it traps is not known")
    is_late = all(_SIGNALS.fullmatch(word.text) for word in given[1:])
    before = state.copy()
    after = shell.inside(lambda start: shell.evaluate(given[0].text, code.place, start), state.copy())
    if not is_late and after and after.variables != before.variables:
        raise Unclear("what it traps changes variables at any time")
    return state


def _alias(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    state.status = 0
    if "expand_aliases" in state.options:
        for word in words[1:]:
            name, mark, text = word.text.partition("=")
            if word.why or not mark or text.endswith(" "):
                raise Unclear("an alias is not known")
            state.files[f"alias {name}"] = text
    return state


def _let(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    for word in words[1:]:
        if word.why:
            raise Unclear("what let computes is not known")
        found = Words(shell, state, code.place).arithmetic(word.text)
        state.status = None if found is None else int(not found)
    return state


def _test(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    state.status = test(words[1:] if words[0].text == "test" else words[1:-1])
    return state


def _pwd(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    state.output, state.status = None, 0
    return state


def _named(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    """`basename` and `dirname` of one known path."""
    text = words[1].text if len(words) == 2 and not words[1].why else ""
    found = re.fullmatch(r"(.*?)/*([^/\s]+)/*", text)
    state.status = 0 if found else None
    if not found:
        state.write(None)
    else:
        folder = found[1] or ("/" if text.startswith("/") else ".")
        state.write((found[2] if words[0].text == "basename" else folder) + "\n")
    return state


def _seq(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    numbers = [int(word.text) for word in words[1:] if not word.why and re.fullmatch(r"-?\d{1,6}", word.text)]
    if len(numbers) != len(words) - 1 or not 1 <= len(numbers) <= 3 or (len(numbers) == 3 and not numbers[1]):
        state.output = state.status = None
        return state
    first = numbers[0] if len(numbers) > 1 else 1
    step, last = numbers[1] if len(numbers) == 3 else 1, numbers[-1]
    found = range(first, last + (1 if step > 0 else -1), step)
    shell.budget.spend(len(found))
    state.write("".join(f"{number}\n" for number in found))
    state.status = 0
    return state


def _refuse(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    raise Unclear(f"what {words[0].text} changes is not known")


BUILTINS: dict[str, Builtin] = {
    ":": _with_status(0), "true": _with_status(0), "false": _with_status(1), "wait": _with_status(None),
    "umask": _with_status(None), "ulimit": _with_status(None), "hash": _with_status(None), "type": _pwd,
    "jobs": _pwd, "disown": _with_status(None), "kill": _with_status(None), "times": _pwd, "pwd": _pwd,
    "sleep": _with_status(0), "unalias": _refuse, "getopts": _refuse, "enable": _refuse, "local": _refuse,
    "declare": _refuse, "typeset": _refuse, "export": _refuse, "readonly": _refuse, "unset": _refuse, "fc": _refuse,
    "echo": _echo, "printf": _printf, "cat": _cat, "read": _read, "mapfile": _mapfile, "readarray": _mapfile,
    "exit": _exit, "return": _return, "break": _leave, "continue": _leave, "eval": _eval, "source": _source,
    ".": _source, "exec": _exec, "command": _inner, "builtin": _inner, "time": _inner, "shift": _shift, "set": _set,
    "shopt": _shopt, "cd": _cd, "pushd": _cd, "popd": _cd, "trap": _trap, "alias": _alias, "let": _let, "test": _test,
    "[": _test, "basename": _named, "dirname": _named, "seq": _seq,
}  # fmt: skip
