"""Simple commands of bash: assignments, declarations, functions and builtins; programs are not run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.foreign.script import Given, Word, read_text, too_much
from posttrain.foreign.shell_assignments import assign
from posttrain.foreign.shell_conditions import test
from posttrain.foreign.shell_state import State, join
from posttrain.foreign.shell_tree import Code, Misread, Unclear, parse

if TYPE_CHECKING:
    from posttrain.foreign.shell import Shell

MOST_SOURCES = 20
_NAME = re.compile(r"[A-Za-z_]\w*")
# Builtins by what they give: nothing that is known here depends on what else they do.
_STATUSES: dict[str, int | None] = {
    **dict.fromkeys((":", "true", "echo", "sleep"), 0),
    "false": 1,
    **dict.fromkeys(("wait", "umask", "ulimit", "hash", "type", "jobs", "disown", "kill", "times", "pwd", "alias")),
}
# Builtins that set the variables that their words name.
_SETTERS = {"read", "mapfile", "readarray", "getopts", "let", "printf"}
_REFUSED = {"enable", "unalias", "fc", "local", "declare", "typeset", "export", "readonly", "unset", "coproc", "select"}
_OPTIONS = {"e": "errexit", "f": "noglob", "u": "nounset", "x": "xtrace", "a": "allexport", "o": "", "v": "verbose"}
_HARMLESS = {
    *("pipefail", "xtrace", "errexit", "noglob", "nounset", "verbose", "monitor", "errtrace", "functrace", "notify"),
    *("nullglob", "globstar", "dotglob", "nocaseglob", "extglob", "checkwinsize", "inherit_errexit"),
}
_LATE = re.compile(r"(SIG)?(EXIT|INT|TERM|HUP|QUIT|USR1|USR2|PIPE|0|1|2|15)")


def command(shell: Shell, code: Code, state: State) -> State | None:
    """Follow a simple command."""
    prefix: list[Code] = []
    texts: list[str] = []
    end = code.node.start_byte
    for part in code.parts:
        if "\n" in code.between(end, part.node.start_byte).replace("\\\n", ""):
            # The grammar takes assignments on a line of their own for those of the next line's command.
            for assignment in prefix:
                assign(shell, assignment, state)
            prefix = []
        end = part.node.end_byte
        if part.type == "variable_assignment":
            prefix.append(part)
        elif part.type == "herestring_redirect":
            shell.calls.fed(code, part)
        elif part.type.endswith("redirect"):
            raise Unclear("a redirection before the command is not followed")
        else:
            texts.append(part.text)
    words = [word for text in texts for word in shell.words(state, code.place).fields(text)]
    saved = {part.parts[0].text: state.variables.get(part.parts[0].text) for part in prefix}
    for part in prefix:
        assign(shell, part, state)
        name = part.parts[0].text
        found = state.get(name)
        state.variables[name] = replace(found, marks=found.marks | {"x"})
    result = call(shell, words, state, code)
    if result is None or (result := shell.checked(result)) is None:
        return None
    for name, variable in saved.items() if words else ():
        result.variables.pop(name, None)
        result.variables |= {name: variable} if variable else {}
    return result


def call(shell: Shell, words: Sequence[Word], state: State, code: Code) -> State | None:
    """Follow a command by its words: a function, a builtin, or a program that is not run."""
    if not words:
        return state
    name, given = words[0].text, words[1:]
    if words[0].why:
        if re.fullmatch(r"\$\{?\w+\}?", name) and state.is_default(name.strip("${}")):
            return join(call(shell, given, state.copy(), code), state, words[0].why)
        shell.calls.launched(words, state)
        if "/" not in re.split(r"[})]|\$\w+", name)[-1]:
            raise Unclear(f"which command {name} is, is not known")
    elif name in state.functions:
        body = state.functions[name]
        if body is None:
            raise Unclear(f"what {name} does is not known")
        return _function(shell, body, given, state)
    elif name in _STATUSES:
        state.status = _STATUSES[name]
        return state
    elif name in _SETTERS:
        return _set_names(given, state, name, code)
    elif name in _REFUSED:
        raise Unclear(f"what {name} changes is not known")
    elif follow := _BUILTINS.get(name):
        return follow(shell, state, given, code)
    else:
        shell.calls.launched(words, state)
    # A program may write the files that it is given.
    for word in given:
        write(shell, word)
    state.status = None
    return state


def write(shell: Shell, word: Word) -> None:
    """Note that a file may be written."""
    shell.written.add(word.text.rpartition("/")[2])


def _set_names(given: Sequence[Word], state: State, builtin: str, code: Code) -> State:
    """Forget the variables that `read` and its relatives set."""
    state.status = None
    if builtin == "printf" and (not given or given[0].text != "-v"):
        state.status = 0 if given and not given[0].why else None
        return state
    if any(word.why for word in given[: 2 if builtin == "printf" else None]):
        raise Unclear(f"what {builtin} sets is not known")
    names = [name for word in given[: 2 if builtin == "printf" else None] for name in _NAME.findall(word.text)]
    for name in (*names, "REPLY", "MAPFILE", "OPTARG", "OPTIND"):
        state.forget(name, f"line {code.line}: {builtin} sets it")
    return state


def define(shell: Shell, code: Code, state: State) -> State | None:
    """Note a function."""
    name = next(part.text for part in code.parts if part.type == "word")
    state.functions[name] = code.parts[-1] if not code.parts[-1].type.endswith("redirect") else None
    state.status = 0
    return state


def _function(shell: Shell, body: Code, given: Sequence[Word], state: State) -> State | None:
    saved, shell.loops = shell.loops, []
    shell.depth_of_calls += 1
    why = f"the function in line {body.line} may return earlier"
    result = _with_arguments(shell, lambda start: shell.statement(body, start), given, state, why)
    hidden = f"{shell.depth_of_calls} "
    shell.depth_of_calls -= 1
    shell.loops = saved
    for name in [name for name in result.variables if name.startswith(hidden)] if result else ():
        result.variables[name.removeprefix(hidden)] = result.variables.pop(name)  # type: ignore[union-attr]
    return result


def _with_arguments(
    shell: Shell, run: Callable[[State], State | None], given: Sequence[Word] | None, state: State, why: str
) -> State | None:
    """Run a function or a script with its arguments, up to where it returns; None: it has those of its caller."""
    arguments, returns, shell.returns = state.get("@"), shell.returns, []
    if given is not None:
        # What is not known may come from a list of which some items need not be there.
        state.assign_array("@", given, False, any(word.why for word in given))
    shell.deeper(3)
    shell.bodies += 1
    result = run(state)
    shell.bodies -= 1
    shell.deeper(-3)
    for ended in shell.returns:
        result = join(result, ended, why)
    shell.returns = returns
    if result and given is not None:
        result.variables["@"] = arguments
    return result


def source(shell: Shell, state: State, words: Sequence[Word], code: Code) -> State | None:
    """Follow a script that lies beside this one."""
    if not words or "<(" in code.text:
        raise Unclear("what it sources is not known")
    word = words[0]
    shell.sources += 1
    if shell.sources > MOST_SOURCES:
        raise too_much(f"it sources more than {MOST_SOURCES} scripts")
    text, file = script(shell, word, state)
    if text is None:
        why = "it does not lie beside the script, so what it sets is not known"
        shell.unread.append(Given(f"source {word.text}", (), word.place, why))
        state.status = None
        if file:
            state.lose(f"{word.place} sources what is not read")
        return state
    shell.budget.spend(len(text))
    why = f"{file} may return earlier"
    return _with_arguments(shell, lambda start: shell.program(parse(text, file), start), words[1:] or None, state, why)


def script(shell: Shell, word: Word, state: State) -> tuple[str | None, str]:
    """Return the text and the name of a script that a word names.

    Where there is no text, the name says whether there may be such a script nevertheless.
    """
    name = os.path.normpath(word.text)
    is_changed = "moved" in state.options or word.text.rpartition("/")[2] in shell.written
    # Of a path that is not known, what follows the last expansion is looked for.
    tail = re.split(r"[)}`\"]|\$\w+", word.text)[-1].lstrip("/") if word.why else word.text
    path = shell.folder / tail
    is_inside = path.resolve().is_relative_to(shell.folder.resolve())
    if is_inside and path.is_file() and not is_changed:
        return read_text(path), str(path.relative_to(shell.folder))
    is_missing = is_inside and not word.why and not path.exists() and not is_changed
    return None, "" if is_missing else name


# ---- builtins ----


def _exit(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    state.status = _status(given, state)
    shell.exits.append(state)
    return None


def _return(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    state.status = _status(given, state) if shell.bodies else 1
    if not shell.bodies:
        # Outside of functions and scripts that are sourced it is an error.
        return state
    shell.returns.append(state)
    return None


def _status(given: Sequence[Word], state: State) -> int | None:
    if not given:
        return state.status
    return int(given[0].text) % 256 if not given[0].why and given[0].text.isdigit() else None


def _leave(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    """`break` and `continue`: whichever loop is left, its end may be reached like this."""
    state.status = 0
    for loop in shell.loops:
        loop.append(state.copy())
    return None if shell.loops else state


def _eval(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    text = " ".join(word.text for word in given)
    if any(word.why for word in given):
        raise Unclear(f"what {text[:60]} evaluates is not known")
    shell.budget.spend(len(text))
    state.status = 0
    return shell.evaluate(text, code.place, state)


def _exec(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    if not given:
        state.status = 0
        return state
    shell.calls.launched(given, state)
    state.status = None
    shell.exits.append(state)
    return None


def _inner(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    """`command`, `builtin` and `time`: the command behind them."""
    given = given[1:] if given and given[0].text in ("-p", "--") else given
    if given and (given[0].text[:1] == "-" or given[0].why):
        shell.calls.launched(given, state)
        state.status = None
        return state
    if given and (given[0].text in state.functions or re.search(r"=|^(!|if|for|while|\(|\[\[)$", given[0].text)):
        raise Unclear("what stands behind it is not followed")
    return call(shell, given, state, code)


def _shift(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    count, arguments = given[0].text if given else "1", state.get("@")
    if arguments.why or "open" in arguments.marks or not count.isdigit():
        state.forget("@", "how many arguments are left is not known")
        state.status = None
        return state
    state.status = int(int(count) > len(arguments.words))
    if not state.status:
        state.variables["@"] = replace(arguments, words=arguments.words[int(count) :])
    return state


def _set(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    rest, state.status = list(given), 0
    while rest:
        word = rest.pop(0)
        if word.why:
            raise Misread("the options are not known")
        if word.text in ("--", "-") or word.text[:1] not in ("-", "+"):
            arguments = rest if word.text in ("--", "-") else [word, *rest]
            state.assign_array("@", arguments, False, any(word.why for word in arguments))
            break
        names = [_OPTIONS.get(letter, "?") for letter in word.text[1:] if letter != "o"]
        if "o" in word.text[1:] and rest:
            names.append(rest.pop(0).text)
        _change_options(state, set(names), word.text[0] == "-")
    return state


def _shopt(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    names = {word.text for word in given if not word.text.startswith("-")}
    _change_options(state, names, any(word.text == "-s" for word in given))
    state.status = None
    return state


def _change_options(state: State, names: set[str], is_on: bool) -> None:
    if not names <= _HARMLESS | {"allexport"}:
        raise Misread(f"the option {', '.join(sorted(names))} is not followed")
    state.options = state.options | names if is_on else state.options - names


def _cd(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    state.options |= {"moved"}
    state.status = None
    return state


def _trap(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    words = [word for word in given if word.text != "--"]
    state.status = 0
    if len(words) < 2 or words[0].text in ("", "-"):
        return state
    if any(word.why for word in words) or not all(_LATE.fullmatch(word.text) for word in words[1:]):
        raise Misread("what it traps may change variables at any time")
    shell.apart(words[0].text, code.place, state)
    return state


def _test(shell: Shell, state: State, given: Sequence[Word], code: Code) -> State | None:
    state.status = test(given)
    return state


_BUILTINS: dict[str, Callable[[Shell, State, Sequence[Word], Code], State | None]] = {
    "exit": _exit, "return": _return, "break": _leave, "continue": _leave, "eval": _eval, "source": source,
    ".": source, "exec": _exec, "command": _inner, "builtin": _inner, "time": _inner, "shift": _shift,
    "set": _set, "shopt": _shopt, "cd": _cd, "pushd": _cd, "popd": _cd, "trap": _trap, "test": _test,
}  # fmt: skip
