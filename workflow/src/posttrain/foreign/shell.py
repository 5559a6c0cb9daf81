"""Launch scripts in bash: a small interpreter over the syntax tree, which runs no command.

It follows assignments, arrays, `if`, `case`, functions and `source` over what is known. What a loop or anything else
may set is unknown from there on, with the line; so is everything where a construct could set any variable.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain.foreign.script import UNSET, Budget, Given, Script, Word, merged, read_text, too_much
from posttrain.foreign.shell_calls import KNOWN, SHELLS, STARTERS, found_call, unclear_call
from posttrain.foreign.shell_conditions import condition, fits
from posttrain.foreign.shell_state import State, Variable
from posttrain.foreign.shell_tree import Code, Misread, Unclear, check, parse, statements, words_of
from posttrain.foreign.shell_words import SETS, Words, changed_names

# What is followed: it gets a state to change, and tells whether it succeeds, None where that is not known.
Run = Callable[[State], bool | None]

MOST_SOURCES = 20
_DEEPEST = 40
_STATUSES: dict[str, bool | None] = {
    **dict.fromkeys((":", "true", "echo"), True),
    "false": False,
    **dict.fromkeys(("wait", "umask", "ulimit", "hash", "type", "jobs", "disown", "kill", "times", "pwd", "alias")),
    **dict.fromkeys(("cd", "pushd", "popd", "test", "sleep", "printf")),
}
# Builtins that set the variables that their words name; builtins that may set any.
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
# Names of variables behind a dollar, which are only read; what names the variable that it sets by an expansion.
_READ = re.compile(r"\$\w+|\$\{\w+(?=[}\[:%#/-])")
_INDIRECT = re.compile(
    r"((read|mapfile|readarray|getopts|let|unset|export|declare|local|typeset|readonly)\b[^=<]*)\$"
    r"|(declare|local|typeset)\s+-\w*n|\(\([^)]*\$\w+\}?\s*(\+\+|--|[-+*/%]?=[^=])"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[.*?\])?(\+?=)(.*)", re.DOTALL)
# Files that can be opened in any case.
_OPENS = re.compile(
    r"\d*([&>|]+|<&)\s*(/dev/(null|stdout|stderr|tty)|-|[\w.-]+|>\(.*)|<\s*(/dev/null|<\(.*)", re.DOTALL
)
# What ends the shell by failing under `set -e`.
_LEAVES = {"command", "test_command", "compound_statement", "subshell", "variable_assignment", "pipeline"}


def read_shell(path: Path) -> Script:
    """Return the flags that a bash script gives to `train.py`, or those of all its arrays where it calls none.

    Raises:
        ConfigError: It is no script, or more work than one.
    """
    shell, state, text = Shell(path.parent), State(), read_text(path)
    # Bash takes a byte order mark for the beginning of a command's name.
    shell.program(parse(re.sub("^\ufeff", "bom ", text), path.name), state)
    calls = shell.calls
    if not calls and "train" not in text:
        calls = [[word for name, found in state.variables.items() if "ARGS" in name for word in found.words]]
    script = merged(calls)
    return replace(script, unread=tuple(dict.fromkeys((*script.unread, *shell.unread))))


class Shell:
    """Follows scripts, and keeps what they give to the training.

    Args:
        folder: Where those lie that may be sourced.
    """

    def __init__(self, folder: Path):
        self.budget, self.calls, self.unread = Budget(), list[list[Word]](), list[Given]()
        self._folder, self._sources, self._depth, self._guards = folder, 0, 0, 0
        # Bodies of the functions that are followed; states in which functions, and loops, are left early.
        self._active: list[Code] = []
        # Of each its depth, the variables at its beginning, and what its local ones hide.
        self._locals: list[tuple[int, dict[str, Variable], dict[str, Variable | None]]] = []
        self._returns: list[list[State]] = []
        self._breaks: list[list[State]] = []

    def program(self, code: Code, state: State) -> bool | None:
        """Follow a script; what comes after a part that is misread is not followed."""
        status: bool | None = True
        for part, is_background in statements(code.parts):
            if state.is_over:
                break
            try:
                check(part)
                status = self._statement(part, state, is_background)
            except Misread as error:
                why = f"line {part.line} is not understood: {error}"
                self._add(unclear_call(part.between(part.node.start_byte, len(part.source)), part.place, why))
                self.unread.append(Given(f"line {part.line}", (), part.place, why))
                state.lose(why)
                if self._depth:
                    raise
                break
        return status

    def _script(self, text: str, place: str, state: State) -> bool | None:
        """Follow a text as a script of its own."""
        file, _, line = place.rpartition(":")
        self.budget.spend(len(text))
        return self._deeper(partial(self.program, parse(text, file, int(line))), state)

    def _add(self, call: list[Word] | None) -> None:
        if call is not None and call not in self.calls:
            self.budget.spend(5 * len(call))
            self.calls.append(call)

    def _words(self, state: State, code: Code) -> Words:
        return Words(state, code.place, self.budget)

    # ---- ways to follow ----

    def _deeper(self, run: Run, state: State) -> bool | None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise too_much(f"it nests more than {_DEEPEST} deep")
        try:
            return run(state)
        finally:
            self._depth -= 1

    def _run(self, parts: Sequence[Code], state: State) -> bool | None:
        """Follow statements one after the other."""
        status: bool | None = True
        for part, is_background in statements(parts):
            if state.is_over:
                return state.status
            status = self._statement(part, state, is_background)
        return status

    def _apart(self, parts: Sequence[Code], state: State) -> bool | None:
        """Follow statements in a shell of their own."""
        inner = state.copy()
        try:
            status = self._run(parts, inner)
        except Misread:
            if any("train" in part.text for part in parts):
                raise
            return None
        return inner.status if inner.is_over else status

    def _guarded(self, parts: Sequence[Code], state: State) -> bool | None:
        """Follow a condition, in which nothing ends the shell by failing."""
        self._guards += 1
        try:
            return self._run(parts, state)
        finally:
            self._guards -= 1

    def _either(self, runs: Sequence[Run], state: State, why: str) -> bool | None:
        """Follow what may be done, and keep what all of it agrees on."""
        ends = [state.copy() for _ in runs]
        found = {run(end) for run, end in zip(runs, ends, strict=True)}
        state.become(ends, why)
        return found.pop() if len(found) == 1 else None

    def _repeat(self, run: Run, state: State, why: str) -> None:
        """Follow what is done any number of times, until nothing more is found that it sets.

        All of that is unknown where it begins.
        """
        calls, written, before, trial = list(self.calls), set[str](), state.copy(), state
        while True:
            self.calls, trial = list(calls), replace(state.copy(), written=set())
            self._left_early(self._breaks, run, trial, why)
            if trial.written <= written:
                break
            written |= trial.written
            if "" in written:
                state.lose(why)
            for name in written - {""}:
                state.forget([name], why, trial.get(name).has_flags())
        state.become([before, trial], why)

    def _left_early(self, frames: list[list[State]], run: Run, state: State, why: str) -> bool | None:
        """Follow what may be left before its end."""
        frames.append([])
        try:
            status = self._deeper(run, state)
        finally:
            left = frames.pop()
        ends = [state.copy(), *(replace(end, is_over=False) for end in left)]
        state.become(ends, why)
        return None if len(ends) > 1 else status

    def _poison(self, code: Code, state: State, why: str, text: str) -> None:
        """Know nothing more of what is named in a text, and look for calls in a construct that is not followed."""
        if _INDIRECT.search(text) or code.type == "command":
            state.lose(why)
        if code.type == "command":
            self._add(unclear_call(code.text, code.place, why))
        state.forget(_NAME.findall(_READ.sub(" ", text)), why, bool(re.search(r"--[a-z]|\[[@*]\]|\$[@*]", text)))
        self._repeat(partial(self._inside, code), state, why)

    def _inside(self, code: Code, state: State) -> None:
        """Follow the statements in a construct one after the other."""
        run = self._guarded if code.type == "while_statement" else self._run
        run([part for part in code.parts if part.type in _STATEMENTS or part.type == "&"], state)
        for part in code.parts:
            if part.type not in _STATEMENTS and part.node.child_count:
                self._inside(part, state)

    # ---- statements ----

    def _statement(self, code: Code, state: State, is_background: bool = False) -> bool | None:
        self.budget.spend(20 + len(state.variables) // 4)
        if is_background:
            self._deeper(partial(self._apart, [code]), state)
            return True
        follow = getattr(self, f"_{code.type}", None)
        try:
            if follow is None:
                is_loop = code.type in _LOOPS
                end = code.parts[-1].node.start_byte if is_loop else code.node.end_byte
                text = "" if code.type == "while_statement" else code.between(code.node.start_byte, end)
                text = " ".join(changed_names(text)) if code.type == "c_style_for_statement" else text
                why = f"it depends on the {'loop' if is_loop else code.type} in line {code.line}"
                self._poison(code, state, why, text)
                return None
            status = self._deeper(partial(follow, code), state)
        except Unclear as error:
            self._poison(code, state, f"line {code.line}: {error}", code.text)
            return None
        if status is False and "e" in state.options and not self._guards:
            is_group = code.type == "compound_statement" and not code.text.startswith("((")
            if code.type in _LEAVES and not is_group:
                state.is_over, state.status = True, False
        return status

    def _if_statement(self, code: Code, state: State) -> bool | None:
        clauses = [[part for part in code.parts if part.type not in ("elif_clause", "else_clause", "fi")]]
        clauses += [part.parts for part in code.parts if part.type in ("elif_clause", "else_clause")]
        return self._clauses(clauses, f"it depends on the branch in line {code.line}", state)

    def _clauses(self, clauses: Sequence[Sequence[Code]], why: str, state: State) -> bool | None:
        """Follow the first clause whose condition holds."""
        if not clauses:
            return True
        first, *rest = clauses
        then = next((at for at, part in enumerate(first) if part.type == "then"), 0)
        status = self._guarded(first[1:then], state)
        if state.is_over:
            return state.status
        if any(part.text.startswith("exit") for part in first[then:]) and any(
            "-z" in part.text for part in first[:then]
        ):
            # The environment of whoever starts the script has what it asks for.
            status = None
        body, otherwise = partial(self._run, first[then + 1 :]), partial(self._clauses, rest, why)
        follow = body if status else partial(self._deeper, otherwise)
        return self._either([body, partial(self._deeper, otherwise)], state, why) if status is None else follow(state)

    def _case_statement(self, code: Code, state: State) -> bool | None:
        if re.search(r";;?&", code.text) or SETS.search(code.parts[1].text):
            raise Misread("the case is not followed")
        subject = self._words(state, code).joined(code.parts[1].text)
        runs: list[Run] = []
        for item in [part for part in code.parts if part.type == "case_item"]:
            end = next(at for at, part in enumerate(item.parts) if part.type == ")")
            found = {fits(subject, part.text) for part in item.parts[:end] if part.node.is_named}
            if found != {False}:
                runs.append(partial(self._run, item.parts[end + 1 :]))
            if True in found:
                break
        else:
            runs.append(lambda end: True)
        return self._either(runs, state, f"it depends on the case in line {code.line}")

    def _for_statement(self, code: Code, state: State) -> bool | None:
        """Follow a loop over known words that nothing leaves early."""
        name, head = code.parts[1].text, [part for part in code.parts[3:-1] if part.type != ";"]
        words = [word for part, item in words_of(head) for word in self._words(state, part).fields(item)]
        body = partial(self._run, code.parts[-1].parts[1:-1])
        is_left = re.search(r"\b(break|continue)\b", code.text) or code.parts[0].text != "for"
        if is_left or any(word.why for word in words) or not head:
            why = f"it depends on the loop in line {code.line}"
            is_list = any(word.is_list or word.text.startswith("-") for word in words)
            state.forget([name], why, is_list)
            self._repeat(body, state, why)
            return None
        for word in words:
            if not state.is_over:
                state.assign(name, [word])
                body(state)
        return None

    def _list(self, code: Code, state: State) -> bool | None:
        left, operator, right = code.parts
        status = self._guarded([left], state)
        if state.is_over or status is (operator.text == "||"):
            return status
        why = f"it depends on the command before {operator.text} in line {code.line}"
        follow = partial(self._run, [right])
        return follow(state) if status is not None else self._either([lambda end: None, follow], state, why)

    def _negated_command(self, code: Code, state: State) -> bool | None:
        status = self._guarded(code.parts[1:], state)
        return None if status is None else not status

    def _compound_statement(self, code: Code, state: State) -> bool | None:
        return self._test_command(code, state) if code.text.startswith("((") else self._run(code.parts[1:-1], state)

    def _test_command(self, code: Code, state: State) -> bool | None:
        if SETS.search(code.text):
            raise Unclear("what the condition sets is not followed")
        if len(re.findall(r"&&|\|\||!", code.text)) > _DEEPEST:
            return None
        if code.text.startswith("(("):
            number = self._words(state, code).arithmetic(code.text[2:-2])
            return None if number is None else bool(number)
        return condition(code.parts[1:-1], self._words(state, code), code.text.startswith("[["))

    def _subshell(self, code: Code, state: State) -> bool | None:
        return self._apart(code.parts[1:-1], state)

    def _pipeline(self, code: Code, state: State) -> bool | None:
        found = [self._apart([part], state) for part in code.parts if part.node.is_named]
        return False if False in found and "pipefail" in state.options else None

    def _redirected_statement(self, code: Code, state: State) -> bool | None:
        redirects = [part for part in code.parts if part.type.endswith("_redirect")]
        body = [part for part in code.parts if not part.type.endswith("_redirect")]
        name = body[0].text.split()[0].rpartition("/")[2] if body else ""
        for part in redirects:
            is_file = part.type == "file_redirect"
            ends = [child for child in part.parts if child.node.is_named and child.type != "file_descriptor"]
            inner = [end for end in ends if not end.type.startswith("heredoc_") and end.type != "file_redirect"]
            if SETS.search(part.text) or len(inner) > is_file + (part.type == "herestring_redirect"):
                if "train" in code.text:
                    self._add(unclear_call(code.text, code.place, "the redirection is not followed"))
                raise Unclear("what the redirection does is not followed")
            if not is_file and name in SHELLS | STARTERS:
                self._add(unclear_call(part.text, part.place, f"what {name} reads is not followed"))
        if all(part.type != "file_redirect" or _OPENS.fullmatch(part.text) for part in redirects):
            return self._run(body, state)
        why = f"it depends on the file that line {code.line} opens"
        return self._either([partial(self._run, body), lambda end: None], state, why)

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
                # What is local to a caller hides something that is there again.
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
        """Look for calls in what a command is given; return whether the last substitution succeeds."""
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
            # What a function gets like this, it has no more when it ends.
            self._run(prefix, state)
            status = self._call(words, code, state)
            state.forget([part.parts[0].text for part in prefix], f"line {code.line} sets it for one command")
            return status
        return self._call(words, code, state)

    def _call(self, words: list[Word], code: Code, state: State, is_direct: bool = False) -> bool | None:
        """Follow a command by its words: a function, a builtin, or a program that is not run."""
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
        """Note what a local variable hides; nothing where it may be another value, or not be hidden."""
        depth, before, found = self._locals[-1]
        # Three steps deeper are the statements of the body that nothing passes over.
        is_sure = self._depth == depth + 3 and hidden is before.get(name)
        found.setdefault(name, hidden if is_sure else None)

    def _source(self, given: Sequence[Word], code: Code, state: State) -> bool | None:
        """Follow a script that lies beside this one, unless it may be another one when it is run."""
        word = given[0]
        # Of a path that is not known, what follows the last expansion is looked for.
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
        # A file whose name is not known may be this one.
        if not is_beside or word.why or path.exists() or re.search(r">\s*\S*[$`]", text):
            state.lose(f"{word.place} sources what is not read")
        return None

    def _launch(self, words: Sequence[Word], code: Code | None = None) -> None:
        """Look whether a program that is not run here starts the training."""
        name = next((word.text.rpartition("/")[2] for word in words if word.text.rpartition("/")[2] not in SHELLS), "")
        if name.endswith(".sh") and code and code.source.count(name.encode()) > 1:
            self._add(unclear_call("train.py", code.place, f"what {name} starts is not known"))
        self._add(found_call(words, self._inner_script) if words else None)

    def _inner_script(self, text: Word, given: Sequence[Word]) -> None:
        """Follow a script that is a word of a command."""
        if text.why:
            self._add(unclear_call(f"{text.text} train.py", text.place, text.why))
            return
        inner = State({"@": Variable(tuple(given), True)}, lost="a shell of its own has only what is exported")
        self._script(text.text, text.place, inner)


_LOOPS = ("for_statement", "c_style_for_statement", "while_statement")
_STATEMENTS = {
    *_LOOPS,
    *(name[1:] for name in vars(Shell) if re.fullmatch(r"_\w+_(statement|command|assignments?)", name)),
}
_STATEMENTS |= {"list", "subshell", "pipeline", "command", "function_definition"}
