"""An interpreter for bash launch scripts, which walks the syntax tree and runs no command.

It interprets assignments, arrays, `if`, `case`, functions and `source` with known values. Variables that a loop or an
unsupported construct may set become unknown from there on, with the line; if it could set any variable, all do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain_import.script import UNSET, Given, Script, Word, merged, read_text, too_much
from posttrain_import.shell_calls import KNOWN, SHELLS, found_call, unclear_call
from posttrain_import.shell_flow import Flow
from posttrain_import.shell_state import State, Variable
from posttrain_import.shell_tree import Code, Misread, Unclear, parse, words_of
from posttrain_import.shell_words import SETS

MOST_SOURCES = 20
_STATUSES: dict[str, bool | None] = {
    **dict.fromkeys((":", "true", "echo"), True),
    "false": False,
    **dict.fromkeys(("wait", "umask", "ulimit", "hash", "type", "jobs", "disown", "kill", "times", "pwd", "alias")),
    **dict.fromkeys(("cd", "pushd", "popd", "test", "sleep", "printf")),
}
# Builtins that set the variables in their words; builtins that may set any variable.
_SETTER = re.compile(r"(read|mapfile|readarray|getopts|let|shift)( |$)|printf -v|wait .*-\w*p", re.DOTALL)
_SET_ANY = {
    "eval",
    "source",
    ".",
    "enable",
    "unalias",
    "fc",
    "coproc",
    "select",
    "declare",
    "local",
    "typeset",
    "export",
}
_SET_ANY |= {"readonly", "unset", "command", "builtin", "time"}
_LATE = re.compile(r"(SIG)?(EXIT|INT|TERM|HUP|QUIT|USR[12]|0|1|2|15)")
_HARMLESS = re.compile(
    r"set( [-+][euxva]+| [-+][euxva]*o (pipefail|xtrace|errexit|nounset|verbose|monitor))*( -- .*)?"
    r"|shopt( -[suq])*( (nullglob|globstar|dotglob|nocaseglob|extglob|checkwinsize|inherit_errexit))*",
    re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[.*?\])?(\+?=)(.*)", re.DOTALL)


def read_shell(path: Path) -> Script:
    """Return the flags that a bash script passes to `train.py`; without a call, those of all its arrays.

    Raises:
        ConfigError: The file is not a script, or needs too much work.
    """
    shell, state, text = Shell(path.parent), State(), read_text(path)
    # Bash reads a byte order mark as part of the first command's name.
    shell.program(parse(re.sub("^\ufeff", "bom ", text), path.name), state)
    calls = shell.calls
    if not calls and "train" not in text:
        calls = [[word for name, found in state.variables.items() if "ARGS" in name for word in found.words]]
    script = merged(calls)
    return replace(script, unread=tuple(dict.fromkeys((*script.unread, *shell.unread))))


class Shell(Flow):
    """Interprets scripts, and records the words that they pass to the training."""

    # ---- assignments ----

    def _variable_assignments(self, code: Code, state: State) -> bool | None:
        return [self._variable_assignment(part, state) for part in code.parts][-1]

    def _variable_assignment(self, code: Code, state: State) -> bool | None:
        match = _ASSIGNMENT.fullmatch(code.text)
        if match is None:
            raise Unclear("the assignment is not followed")
        name, index, sign, text = match.groups()
        last = code.parts[-1]
        if last.type == "array":
            items = list(words_of(last.parts[1:-1]))
            if any(re.match(r"\[.*?\]\+?=", item) for _, item in items):
                raise Unclear("an array with indices is not followed")
            words = [word for part, item in items for word in self._words(state, part).fields(item)]
            self.budget.spend(5 * len(words))
        else:
            words = [self._words(state, code).joined(text)]
        if index:
            place, old = index[1:-1], state.get(name).words
            is_known = place.isdigit() and int(place) < len(old)
            if not is_known or any(word.why for word in old[: int(place) + 1]) or sign == "+=":
                raise Unclear("one item of an array is set")
            words = [*old[: int(place)], *words, *old[int(place) + 1 :]]
        state.assign(name, words, bool(index) or last.type == "array", sign == "+=")
        return self._substitutions(code, state)

    def _declaration_command(self, code: Code, state: State) -> bool | None:
        kind, parts = code.parts[0].text, [part for part in code.parts[1:] if part.text[:1] != "-"]
        options = "".join(part.text for part in code.parts[1:] if part.text[:1] == "-")
        names = [_NAME.match(part.text) for part in parts]
        if set(options) & set("pfF") or (kind == "local" and not self._active):
            return None
        if "n" in options:
            raise Misread("references are not followed")
        if set(options) - set("-xgar"):
            state.fixed |= {name[0] for name in names if name}
            raise Unclear("the attributes are not followed")
        earlier = set[str]()
        for part, name in zip(parts, names, strict=True):
            is_value = part.type == "variable_assignment"
            if name is None or not (is_value or part.type == "variable_name"):
                raise Unclear("what it declares is not known")
            if is_value and earlier & set(_NAME.findall(part.parts[-1].text)):
                raise Unclear("all values are expanded before one is set")
            if re.search(r"\{.*(,|\.\.)", re.sub(r"\"[^\"]*\"|'[^']*'|\$\{", "", part.text), re.DOTALL):
                raise Misread("what it declares is not followed")
            hidden = state.variables.get(name[0])
            if is_value:
                self._variable_assignment(part, state)
            if self._active and kind in ("local", "declare", "typeset") and "g" not in options:
                self._hide(name[0], hidden)
                if not is_value:
                    state.forget([name[0]], f"line {code.line} declares it")
            if kind == "readonly" or "r" in options:
                state.constants |= {name[0]}
            earlier.add(name[0])
        return True

    def _unset_command(self, code: Code, state: State) -> bool | None:
        names = [part.text for part in code.parts[1:] if part.text not in ("-v", "-f")]
        if not all(_NAME.fullmatch(name) for name in names):
            raise Unclear("what it unsets is not known")
        is_function = any(part.text == "-f" for part in code.parts)
        for name in names:
            if is_function or name in state.functions:
                state.functions.pop(name, None)
            if not is_function:
                # Unsetting a caller's local variable makes the hidden one visible again.
                hiding = [found for *_, found in self._locals if name in found]
                for found in hiding:
                    found[name] = None
                state.forget([name], f"line {code.line} unsets it" if hiding else f"{UNSET} {name}")
        return True

    # ---- commands ----

    def _function_definition(self, code: Code, state: State) -> bool | None:
        name = next(part.text for part in code.parts if part.type == "word")
        state.functions[name] = code.parts[-1] if code.parts[-1].type == "compound_statement" else None
        return True

    def _substitutions(self, code: Code, state: State) -> bool | None:
        """Search a command's substitutions for calls; return whether the last substitution succeeds."""
        status: bool | None = True
        for part in code.walk():
            if part.type in ("command_substitution", "process_substitution"):
                status = self._apart(part.parts[1:-1], state)
        return status

    def _command(self, code: Code, state: State) -> bool | None:
        redirects, parts = list[Code](), list[Code]()
        for part in code.parts:
            (redirects if part.type.endswith("_redirect") else parts).append(part)
        if not parts or any(
            SETS.search(part.text) or part.node.start_byte < parts[0].node.start_byte for part in redirects
        ):
            raise Unclear("the redirection is not followed")
        prefix = list(itertools.takewhile(lambda part: part.type == "variable_assignment", parts))
        given = parts[len(prefix) :]
        if prefix and given and "\n" in code.between(prefix[-1].node.end_byte, given[0].node.start_byte):
            self._run(prefix, state)
            return self._script(code.between(given[0].node.start_byte, code.node.end_byte), given[0].place, state)
        self._substitutions(code, state)
        words = [word for part, item in words_of(given) for word in self._words(state, part).fields(item)]
        if "u" in state.options and any(word.why.removeprefix(f"{UNSET} ") in state.variables for word in words):
            state.is_over = True
        if not words or state.is_over:
            return self._run(prefix, state)
        if prefix and (words[0].text in {*state.functions, *_SET_ANY} or SETS.search(code.text)):
            # Prefix assignments end with the function call.
            self._run(prefix, state)
            status = self._call(words, code, state)
            state.forget([part.parts[0].text for part in prefix], f"line {code.line} sets it for one command")
            return status
        return self._call(words, code, state)

    def _call(self, words: list[Word], code: Code, state: State, is_direct: bool = False) -> bool | None:
        """Interpret a command by its words: a function, a builtin, or a program that is not run."""
        name, given, texts = words[0].text, words[1:], [word.text for word in words[1:]]
        spelled = " ".join(word.text for word in words)
        if words[0].why:
            before = len(self.calls)
            self._launch(words)
            if len(self.calls) > before:
                state.lose(f"line {code.line}: which command {name} is, is not known")
            elif "/" not in re.split(r"[})]|\$\w+", name)[-1]:
                raise Unclear(f"which command {name} is, is not known")
        elif name in state.functions and not is_direct:
            return self._function(state.functions[name], given, state)
        elif _SETTER.match(spelled):
            targets = given[:2] if name == "printf" else given
            if any(word.why for word in targets):
                raise Unclear(f"what {name} sets is not known")
            names = _NAME.findall(" ".join(re.sub("^-v", "", word.text) for word in targets))
            names += ["@"] if name == "shift" else []
            is_list = name != "printf" and bool(re.search(r"--[a-z]|\[[@*]", code.text))
            is_list = is_list or Variable(tuple(given[2:])).has_flags()
            is_list = is_list or any(state.get(used).has_flags() for used in _NAME.findall(code.text))
            is_array = name not in ("let", "printf", "getopts")
            state.forget(names, f"line {code.line}: {name} sets it", is_list, is_array)
        elif name in _STATUSES:
            return _STATUSES[name]
        elif name in ("set", "shopt"):
            self._set(spelled, state)
        elif name == "trap":
            if len(given) > 1 and texts[0] not in ("", "-"):
                if any(word.why for word in given) or not all(map(_LATE.fullmatch, texts[1:])):
                    raise Misread("what it traps may change variables at any time")
                self._script(texts[0], code.place, state.copy())
        elif name in ("return", "break", "continue"):
            if frames := self._returns if name == "return" else self._breaks:
                frames[-1].append(state.copy())
                state.is_over = True
        elif name == "exit":
            state.is_over, state.status = True, texts == ["0"] if "".join(texts).isdigit() else None
        elif name in ("command", "builtin", "time") and given and texts[0][:1] != "-":
            if re.search(r"=|^[{(!\[]", texts[0]):
                raise Misread("what is timed is not followed")
            return self._deeper(lambda end: self._call(given, code, end, True), state)
        elif name == "exec":
            self._launch(given)
            state.is_over = bool(given)
        elif name == "eval" and not any(word.why for word in given):
            return self._script(" ".join(texts), code.place, state)
        elif name in ("source", ".") and given:
            return self._source(given, code, state)
        elif name in _SET_ANY and texts[:1] not in (["-v"], ["-V"]):
            raise Unclear(f"what {name} sets is not known")
        else:
            if state.lost and name.isidentifier() and name not in KNOWN:
                state.lose(state.lost)
            self._launch(words, code)
        return state.status if state.is_over else None

    def _set(self, spelled: str, state: State) -> None:
        if not _HARMLESS.fullmatch(spelled):
            raise Misread(f"{spelled} changes how all that follows is read")
        options = spelled if spelled.startswith("set") else ""
        for sign, letters, option in re.findall(r" ([-+])([euxva]+|(?=o))(?:o (\w+))?", options):
            found = {*letters, option.replace("errexit", "e").replace("nounset", "u")}
            state.options = state.options | found if sign == "-" else state.options - found
        if " -- " in spelled:
            state.forget(["@"], "the arguments are not followed")

    def _function(self, body: Code | None, given: Sequence[Word], state: State) -> bool | None:
        if body is None or body in self._active:
            raise Unclear("what the function does is not known")
        arguments = state.get("@")
        self._locals.append((self._depth, dict(state.variables), {}))
        state.variables["@"] = Variable(tuple(given), True)
        self._active.append(body)
        why = f"the function in line {body.line} may return earlier"
        try:
            status = self._left_early(self._returns, partial(self._statement, body), state, why)
        finally:
            self._active.pop()
            *_, hidden = self._locals.pop()
        for name, variable in hidden.items():
            state.forget([name], f"it is local to the function in line {body.line}")
            state.variables |= {name: variable} if variable else {}
        state.variables["@"] = arguments
        return status

    def _hide(self, name: str, hidden: Variable | None) -> None:
        """Record the variable that a local one hides; None if it may have another value, or not be hidden."""
        depth, before, found = self._locals[-1]
        # At depth + 3 are the statements of the function's body that always run.
        is_sure = self._depth == depth + 3 and hidden is before.get(name)
        found.setdefault(name, hidden if is_sure else None)

    def _source(self, given: Sequence[Word], code: Code, state: State) -> bool | None:
        """Interpret a script in this script's folder, unless another file may be there at run time."""
        word = given[0]
        # If the path is unknown, use the part after its last expansion.
        tail = re.split(r"[)}`\"]|\$\w+", word.text)[-1].lstrip("/") if word.why else word.text
        folder, path = self._folder.resolve(), (self._folder / tail).resolve()
        text = code.source.decode("utf-8", "replace")
        written = rf"^.*(>|\b(tee|cp|mv|ln|sed|curl|wget|rsync|python3?)\b).*{re.escape(path.name)}"
        is_other = re.search(
            rf"{written}|(^|[;&|{{]|(?<!\$)\(|\b(then|do|else)\b)\s*(cd|pushd|popd)\b", text, re.MULTILINE
        )
        is_beside = path.is_relative_to(folder) and not is_other and "<(" not in code.text and len(given) == 1
        if is_beside and path.is_file():
            self._sources += 1
            if self._sources > MOST_SOURCES:
                raise too_much(f"it sources more than {MOST_SOURCES} scripts")
            name = str(path.relative_to(folder))
            run = partial(self._script, read_text(path), f"{name}:1")
            return self._left_early(self._returns, run, state, f"{name} may return earlier")
        why = "it does not lie beside the script, so what it sets is not known"
        self.unread.append(Given(f"source {word.text}", (), word.place, why))
        # A file with an unknown name may be this one.
        if not is_beside or word.why or path.exists() or re.search(r">\s*\S*[$`]", text):
            state.lose(f"{word.place} sources what is not read")
        return None

    def _launch(self, words: Sequence[Word], code: Code | None = None) -> None:
        """Check whether a program starts the training."""
        name = next((word.text.rpartition("/")[2] for word in words if word.text.rpartition("/")[2] not in SHELLS), "")
        if name.endswith(".sh") and code and code.source.count(name.encode()) > 1:
            self._add(unclear_call("train.py", code.place, f"what {name} starts is not known"))
        self._add(found_call(words, self._inner_script) if words else None)

    def _inner_script(self, text: Word, given: Sequence[Word]) -> None:
        """Interpret a script that is passed as a word of a command."""
        if text.why:
            self._add(unclear_call(f"{text.text} train.py", text.place, text.why))
            return
        inner = State({"@": Variable(tuple(given), True)}, lost="a shell of its own has only what is exported")
        self._script(text.text, text.place, inner)
