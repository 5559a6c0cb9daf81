"""Control flow of bash: interprets statements in sequence, in branches, loops and subshells.

Variables that a loop or an unsupported construct may set become unknown from there on, with the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain_import.script import Budget, Given, Word, too_much
from posttrain_import.shell_calls import SHELLS, STARTERS, unclear_call
from posttrain_import.shell_conditions import condition, fits
from posttrain_import.shell_state import State, Variable
from posttrain_import.shell_tree import Code, Misread, Unclear, check, parse, statements, words_of
from posttrain_import.shell_words import SETS, Words, changed_names

# Interprets a part: changes the state and returns whether the part succeeds, None if unknown.
Run = Callable[[State], bool | None]

_DEEPEST = 40
_NAME = re.compile(r"[A-Za-z_]\w*")
# Variables after a dollar sign, which are only read; constructs that set a variable whose name is expanded.
_READ = re.compile(r"\$\w+|\$\{\w+(?=[}\[:%#/-])")
_INDIRECT = re.compile(
    r"((read|mapfile|readarray|getopts|let|unset|export|declare|local|typeset|readonly)\b[^=<]*)\$"
    r"|(declare|local|typeset)\s+-\w*n|\(\([^)]*\$\w+\}?\s*(\+\+|--|[-+*/%]?=[^=])"
)
# Redirections that cannot fail.
_OPENS = re.compile(
    r"\d*([&>|]+|<&)\s*(/dev/(null|stdout|stderr|tty)|-|[\w.-]+|>\(.*)|<\s*(/dev/null|<\(.*)", re.DOTALL
)
# Nodes whose failure ends the shell under `set -e`.
_LEAVES = {"command", "test_command", "compound_statement", "subshell", "variable_assignment", "pipeline"}
_LOOPS = ("for_statement", "c_style_for_statement", "while_statement")
_STATEMENTS = {
    *(*_LOOPS, "if_statement", "case_statement", "compound_statement", "redirected_statement"),
    *("test_command", "negated_command", "declaration_command", "unset_command", "command"),
    *("variable_assignment", "variable_assignments", "list", "subshell", "pipeline", "function_definition"),
}


class Flow:
    """Interprets statements; a subclass interprets commands, with one method per type of node.

    Args:
        folder: Folder of scripts that may be sourced.
    """

    def __init__(self, folder: Path):
        self.budget, self.calls, self.unread = Budget(), list[list[Word]](), list[Given]()
        self._folder, self._sources, self._depth, self._guards = folder, 0, 0, 0
        # Bodies of the active functions; `_returns` and `_breaks` have the states at early exits.
        self._active: list[Code] = []
        # Per function: its depth, the variables at its beginning, and those that its local variables hide.
        self._locals: list[tuple[int, dict[str, Variable], dict[str, Variable | None]]] = []
        self._returns: list[list[State]] = []
        self._breaks: list[list[State]] = []

    def program(self, code: Code, state: State) -> bool | None:
        """Interpret a script, up to the first part that cannot be parsed."""
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
        """Interpret a text as a separate script."""
        file, _, line = place.rpartition(":")
        self.budget.spend(len(text))
        return self._deeper(partial(self.program, parse(text, file, int(line))), state)

    def _add(self, call: list[Word] | None) -> None:
        if call is not None and call not in self.calls:
            self.budget.spend(5 * len(call))
            self.calls.append(call)

    def _words(self, state: State, code: Code) -> Words:
        return Words(state, code.place, self.budget)

    # ---- kinds of execution ----

    def _deeper(self, run: Run, state: State) -> bool | None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise too_much(f"it nests more than {_DEEPEST} deep")
        try:
            return run(state)
        finally:
            self._depth -= 1

    def _run(self, parts: Sequence[Code], state: State) -> bool | None:
        """Interpret statements in sequence."""
        status: bool | None = True
        for part, is_background in statements(parts):
            if state.is_over:
                return state.status
            status = self._statement(part, state, is_background)
        return status

    def _apart(self, parts: Sequence[Code], state: State) -> bool | None:
        """Interpret statements in a subshell."""
        inner = state.copy()
        try:
            status = self._run(parts, inner)
        except Misread:
            if any("train" in part.text for part in parts):
                raise
            return None
        return inner.status if inner.is_over else status

    def _guarded(self, parts: Sequence[Code], state: State) -> bool | None:
        """Interpret a condition, in which failures do not end the shell."""
        self._guards += 1
        try:
            return self._run(parts, state)
        finally:
            self._guards -= 1

    def _either(self, runs: Sequence[Run], state: State, why: str) -> bool | None:
        """Interpret alternatives, and keep the values on which all agree."""
        ends = [state.copy() for _ in runs]
        found = {run(end) for run, end in zip(runs, ends, strict=True)}
        state.become(ends, why)
        return found.pop() if len(found) == 1 else None

    def _repeat(self, run: Run, state: State, why: str) -> None:
        """Interpret a part that runs any number of times, until it sets no further variable.

        All variables that it sets are unknown at its beginning.
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
        """Interpret a part that may exit early."""
        frames.append([])
        try:
            status = self._deeper(run, state)
        finally:
            left = frames.pop()
        ends = [state.copy(), *(replace(end, is_over=False) for end in left)]
        state.become(ends, why)
        return None if len(ends) > 1 else status

    def _poison(self, code: Code, state: State, why: str, text: str) -> None:
        """Mark the variables in a text as unknown, and search a construct that is not interpreted for calls."""
        if _INDIRECT.search(text) or code.type == "command":
            state.lose(why)
        if code.type == "command":
            self._add(unclear_call(code.text, code.place, why))
        state.forget(_NAME.findall(_READ.sub(" ", text)), why, bool(re.search(r"--[a-z]|\[[@*]\]|\$[@*]", text)))
        self._repeat(partial(self._inside, code), state, why)

    def _inside(self, code: Code, state: State) -> None:
        """Interpret the statements in a construct in sequence."""
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
        """Interpret the first clause whose condition holds."""
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
            # The caller's environment may satisfy the check, so both branches are interpreted.
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
        """Interpret a loop over known words that has no early exit."""
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
