"""Launch scripts in bash: an abstract interpreter over the syntax tree, which runs no command.

Every statement takes what is known before it to what is known after it. What depends on something that only a run would
tell (a command's output, a file, the environment) is unknown with the reason, and so is all that it could touch. Where
a condition is not known, both branches are followed and only what they agree on is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.foreign.script import Budget, Given, Script, Word, merged, read_text, too_much
from posttrain.foreign.shell_builtins import BUILTINS
from posttrain.foreign.shell_calls import Calls
from posttrain.foreign.shell_conditions import condition
from posttrain.foreign.shell_declarations import declare, unset
from posttrain.foreign.shell_flow import Flow, Loop
from posttrain.foreign.shell_state import State, Variable, join
from posttrain.foreign.shell_tree import Code, Ends, Misread, Unclear, check, parse, statements
from posttrain.foreign.shell_variables import Variables
from posttrain.foreign.shell_words import Words

_DEEPEST = 40
MOST_SOURCES = 20


def read_shell(path: Path) -> Script:
    """Return the flags that a bash script gives to `train.py`, or those of all its arrays where it calls none.

    Raises:
        ConfigError: It is no script, or more work than one.
    """
    shell = Shell(path.parent)
    text = read_text(path)
    # Bash takes a byte order mark for the beginning of a command's name.
    code = parse(re.sub("^\ufeff", "bom ", text), path.name)
    state = shell.program(code, State())
    calls = shell.calls.found
    if not calls and state and "train" not in text:
        arrays = [variable for name, variable in state.variables.items() if "ARGS" in name]
        calls = [[word for variable in arrays for word in variable.values]]
    script = merged(calls)
    return replace(script, unread=(*script.unread, *shell.unread))


class Shell(Flow, Variables):
    """What is found on the way: calls of the training, and what could not be read."""

    def __init__(self, folder: Path):
        self.folder, self.budget, self.calls = folder, Budget(), Calls(self)
        self.unread: list[Given] = []
        self.exits: list[State] = []
        self.returns: list[State] = []
        self.loops: list[Loop] = []
        self._depth = self._sourced = self.sources = 0
        # Conditions in which a command may fail under `set -e`.
        self._guards = 0

    def words(self, state: State, place: str) -> Words:
        """Return what expands words in a state."""
        return Words(self, state, place)

    # ---- programs ----

    def program(self, code: Code, state: State | None) -> State | None:
        """Follow a script; what comes after a part that is misread is not followed."""
        for part, is_background in statements(code.parts):
            if state is None:
                return None
            try:
                check(part)
                state = self.statement(part, state, is_background)
            except Misread as error:
                why = f"line {part.line} is not understood: {error}"
                rest = part.between(part.node.start_byte, len(part.source))
                self.calls.unclear(rest, part.file, part.line, why)
                self.unread.append(Given(f"line {part.line}", (), part.place, why))
                lost = State() if state is None else state
                lost.lose(why)
                return lost
        return state

    def evaluate(self, text: str, place: str, state: State) -> State | None:
        """Follow a text as a script of its own in the same shell."""
        file, _, line = place.rpartition(":")
        self._deeper(1)
        try:
            return self.program(parse(text, file, int(line)), state)
        finally:
            self._depth -= 1

    def inside(self, run: Callable[[State], State | None], state: State) -> State | None:
        """Run something in a shell of its own, which ends where it exits."""
        saved = self.exits, self.returns, self.loops
        self.exits, self.returns, self.loops = [], [], []
        result = run(state)
        for ended in (*self.exits, *self.returns):
            result = join(result, ended, "the shell may have ended")
        self.exits, self.returns, self.loops = saved
        return result

    def substitute(self, state: State, text: str, place: str) -> str | None:
        """Return the output of a command substitution; None where it is not known."""
        found = self.output_of(state, text, place)
        return None if found is None else found.rstrip("\n")

    def output_of(self, state: State, text: str, place: str) -> str | None:
        """Return what commands write in a shell of their own."""
        inner = state.copy()
        inner.output = ""
        found = self.inside(lambda start: self.evaluate(text, place, start), inner)
        state.status = found.status if found else None
        state.files = found.files if found else {}
        return found.output if found else None

    def source(self, words: Sequence[Word], state: State) -> State | None:
        """Follow a script that lies beside this one, or that this one has written."""
        word = words[0] if words else Word("", "")
        self._sourced += 1
        if self._sourced > MOST_SOURCES:
            raise too_much(f"it sources more than {MOST_SOURCES} scripts")
        text, file = self.script(word, state)
        if text is None:
            why = "it does not lie beside the script, so what it sets is not known"
            self.unread.append(Given(f"source {word.text}", (), word.place, why))
            state.status = None
            if file:
                state.lose(f"{word.place} sources what is not read")
            return state
        self.budget.spend(len(text))
        saved, self.returns = self.returns, []
        positional = state.positional
        if len(words) > 1:
            state.positional = list(words[1:])
        self._deeper(4)
        self.sources += 1
        result = self.program(parse(text, file), state)
        self._depth -= 4
        self.sources -= 1
        for ended in self.returns:
            result = join(result, ended, f"{file} may return earlier")
        self.returns = saved
        if result and len(words) > 1:
            result.positional = positional
        return result

    def script(self, word: Word, state: State) -> tuple[str | None, str]:
        """Return the text and the name of a script that a word names.

        Where there is no text, the name says whether there may be such a script nevertheless.
        """
        name = os.path.normpath(word.text)
        if not word.why and (written := state.files.get(name)) is not None:
            return written, name
        # Of a path that is not known, what follows the last expansion is looked for.
        tail = re.split(r"[)}`\"]|\$\w+", word.text)[-1].lstrip("/") if word.why else word.text
        path = self.folder / tail
        is_inside = path.resolve().is_relative_to(self.folder.resolve())
        if is_inside and path.is_file() and "moved" not in state.options and name not in state.files:
            return read_text(path), str(path.relative_to(self.folder))
        is_tracked = "moved" in state.options or name in state.files
        is_missing = is_inside and not word.why and not path.exists() and not is_tracked
        return None, "" if is_missing else name

    def _deeper(self, steps: int) -> None:
        self._depth += steps
        if self._depth > _DEEPEST:
            raise too_much(f"it nests more than {_DEEPEST} deep")

    # ---- statements ----

    def statement(self, code: Code, state: State, is_background: bool = False) -> State | None:
        """Follow one statement."""
        if is_background:
            inner = self.inside(lambda start: self.statement(code, start), state.copy())
            state.files |= dict.fromkeys(inner.files) if inner else {}
            state.status, state.output = 0, None if state.output is None or not inner else state.output
            return state
        self.budget.spend(20 + len(state.variables) // 4)
        self._deeper(1)
        try:
            follow = getattr(self, f"_{code.type}", None)
            if follow is None:
                raise Unclear(f"{code.type} is not followed")
            return follow(code, state)
        except Ends:
            self.exits.append(state)
            return None
        except Unclear as error:
            why = f"line {code.line}: {error}"
            self.calls.unclear(code.text, code.file, code.line, why)
            state.lose(why)
            return state
        finally:
            self._depth -= 1

    def run(self, parts: Sequence[Code], state: State | None) -> State | None:
        """Follow statements one after the other."""
        for part, is_background in statements(parts):
            if state is None:
                return None
            state = self.statement(part, state, is_background)
        return state

    def checked(self, state: State | None) -> State | None:
        """End the shell where a command has failed under `set -e`."""
        if state and "errexit" in state.options and not self._guards:
            if state.status:
                self.exits.append(state)
                return None
            state.status = 0
        return state

    def guarded(self, parts: Sequence[Code], state: State) -> State | None:
        """Follow a condition, in which nothing ends the shell by failing."""
        self._guards += 1
        try:
            return self.run(parts, state)
        finally:
            self._guards -= 1

    def _command(self, code: Code, state: State) -> State | None:
        expand = self.words(state, code.place)
        prefix: list[Code] = []
        texts, stdin = [], state.stdin
        end = code.node.start_byte
        for part in code.parts:
            if "\n" in code.between(end, part.node.start_byte).replace("\\\n", ""):
                # The grammar takes assignments on a line of their own for those of the next line's command.
                for assignment in prefix:
                    self.assign_text(assignment, state)
                prefix = []
            end = part.node.end_byte
            if part.type == "variable_assignment":
                prefix.append(part)
            elif part.type == "herestring_redirect":
                state.stdin = self.herestring(part, state)
            elif part.type.endswith("redirect"):
                raise Unclear("a redirection before the command is not followed")
            else:
                texts.append(part.text)
        if alias := state.files.get(f"alias {texts[0]}" if texts else ""):
            return self.evaluate(" ".join([alias, *texts[1:]]), code.place, state)
        words = [word for text in texts for word in expand.fields(text)]
        saved = {part.parts[0].text: state.variables.get(part.parts[0].text) for part in prefix}
        for part in prefix:
            self.assign_text(part, state)
            name = part.parts[0].text
            if name in state.variables:
                found = state.variables[name]
                state.variables[name] = replace(found, attributes=found.attributes | {"x"})
        result = self.checked(self.call(words, state, code))
        if result and any(part.type == "herestring_redirect" for part in code.parts):
            result.stdin = stdin
        if result and words:
            for name, variable in saved.items():
                restore(result, name, variable)
        return result

    def call(self, words: Sequence[Word], state: State, code: Code) -> State | None:
        """Follow a command by its words: a function, a builtin, or a program that is not run."""
        if not words:
            return state
        name = words[0].text
        if words[0].why:
            if state.is_default(name.strip('${}"')):
                return join(self.call(words[1:], state.copy(), code), state, words[0].why)
            self.calls.launched(words, state)
            if "/" not in re.split(r"[})]|\$\w+", name)[-1]:
                raise Unclear(f"which command {name} is, is not known")
        elif name in state.functions:
            body = state.functions[name]
            if body is None:
                raise Unclear(f"what {name} does is not known")
            return self._function(body, words[1:], state)
        elif name in BUILTINS:
            return BUILTINS[name](self, state, words, code)
        else:
            self.calls.launched(words, state)
        # A program may write the files that it is given.
        state.files |= {os.path.normpath(word.text): None for word in words[1:] if word.text[:1] != "-"}
        state.status = state.output = state.stdin = None
        return state

    def _function(self, body: Code, given: Sequence[Word], state: State) -> State | None:
        saved = state.positional, self.returns, self.loops
        state.positional, self.returns, self.loops = list(given), [], []
        state.locals.append({})
        self._deeper(3)
        result = self.statement(body, state)
        self._depth -= 3
        for ended in self.returns:
            result = join(result, ended, f"the function in line {body.line} may return earlier")
        positional, self.returns, self.loops = saved
        if result:
            result.positional = positional
            for name, variable in result.locals.pop().items():
                restore(result, name, variable)
        return result

    def _function_definition(self, code: Code, state: State) -> State | None:
        name = next(part.text for part in code.parts if part.type == "word")
        state.functions[name] = code.parts[-1] if not code.parts[-1].type.endswith("redirect") else None
        state.status = 0
        return state

    # ---- assignments ----

    def _variable_assignment(self, code: Code, state: State) -> State | None:
        return self._assignments([code], state)

    def _variable_assignments(self, code: Code, state: State) -> State | None:
        return self._assignments(code.parts, state)

    def _assignments(self, parts: Sequence[Code], state: State) -> State | None:
        for part in parts:
            self.assign_text(part, state)
        if not any(re.search(r"\$\((?!\()|`", part.text) for part in parts):
            state.status = 0
        return self.checked(state)

    def _declaration_command(self, code: Code, state: State) -> State | None:
        return declare(self, code, state)

    def _unset_command(self, code: Code, state: State) -> State | None:
        return unset(self, code, state)

    def _test_command(self, code: Code, state: State) -> State | None:
        if code.text.startswith("(("):
            return self._arithmetic_command(code, state)
        state.status = condition(self.words(state, code.place), code.text)
        return self.checked(state)


def restore(state: State, name: str, variable: Variable | None) -> None:
    """Set a variable to what it was; None: it was not there."""
    if variable is None:
        state.variables.pop(name, None)
    else:
        state.variables[name] = variable
