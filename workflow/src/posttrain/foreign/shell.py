"""Launch scripts in bash: an abstract interpreter over the syntax tree, which runs no command.

Every statement takes what is known before it to what is known after it. What depends on something that only a run would
tell (a command's output, a file, the environment) is unknown with the reason, and so is all that it could touch. Where
a condition is not known, both branches are followed and only what they agree on is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain.foreign.script import Budget, Given, Script, Word, merged, read_text, too_much
from posttrain.foreign.shell_assignments import assignments, declaration, unset
from posttrain.foreign.shell_calls import Calls
from posttrain.foreign.shell_commands import command, define, write
from posttrain.foreign.shell_conditions import condition
from posttrain.foreign.shell_state import State, join
from posttrain.foreign.shell_tree import Code, Ends, Misread, Unclear, check, document, parse, statements
from posttrain.foreign.shell_words import Words

_DEEPEST = 40
# Rounds of a loop over known words; one with more is taken as one whose words are not known.
_MOST_ROUNDS = 200
# Rounds after which what a loop changes does not change any more.
_SETTLES = 8
_REDIRECTS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
# Names that the head of `for ((i = 0; i < N; i++))` sets.
_SET_IN_HEAD = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
# Files that can be written in any case.
_WRITABLE = re.compile(r"/dev/(null|stdout|stderr|tty)|[012-]|[\w.-]+")

_SIMPLE = {
    "command": command, "variable_assignment": assignments, "variable_assignments": assignments,
    "declaration_command": declaration, "unset_command": unset, "function_definition": define,
}  # fmt: skip


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
        calls = [[word for variable in arrays for word in variable.words]]
    script = merged(calls)
    return replace(script, unread=(*script.unread, *shell.unread))


class Shell:
    """What is found on the way: calls of the training, and what could not be read."""

    def __init__(self, folder: Path):
        self.folder, self.budget, self.calls = folder, Budget(), Calls(self)
        self.unread: list[Given] = []
        # The states in which the shell, the function or a loop's body was left early.
        self.exits: list[State] = []
        self.returns: list[State] = []
        self.loops: list[list[State]] = []
        # Names of files that the script may have written.
        self.written: set[str] = set()
        self.depth_of_calls = self.bodies = self.sources = self._depth = 0
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
        self.deeper(1)
        try:
            return self.program(parse(text, file, int(line)), state)
        finally:
            self.deeper(-1)

    def apart(self, text: str, place: str, state: State) -> int | None:
        """Follow a text in a shell of its own, and return its status."""
        return self._inside(lambda start: self.evaluate(text, place, start), state.copy())

    def _inside(self, run: Callable[[State], State | None], state: State) -> int | None:
        """Run something in a shell of its own, of which only the status is kept."""
        saved = self.exits, self.returns, self.loops
        self.exits, self.returns, self.loops = [], [], []
        after = run(state)
        ends = {end.status for end in (after, *self.exits, *self.returns) if end}
        self.exits, self.returns, self.loops = saved
        return ends.pop() if len(ends) == 1 else None

    def deeper(self, steps: int) -> None:
        """Count how deep the interpreter is."""
        self._depth += steps
        if self._depth > _DEEPEST:
            raise too_much(f"it nests more than {_DEEPEST} deep")

    # ---- statements ----

    def statement(self, code: Code, state: State, is_background: bool = False) -> State | None:
        """Follow one statement."""
        if is_background:
            self._inside(lambda start: self.statement(code, start), state.copy())
            state.status = 0
            return state
        self.budget.spend(20 + len(state.variables) // 4)
        self.deeper(1)
        try:
            if code.type in _SIMPLE:
                return _SIMPLE[code.type](self, code, state)
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
            self.deeper(-1)

    def run(self, parts: Sequence[Code], state: State | None) -> State | None:
        """Follow statements one after the other."""
        for part, is_background in statements(parts):
            if state is None:
                return None
            state = self.statement(part, state, is_background)
        return state

    def checked(self, state: State) -> State | None:
        """End the shell where a command has failed under `set -e`."""
        if "errexit" in state.options and "unclear" not in state.options and not self._guards:
            if state.status:
                self.exits.append(state)
                return None
            state.status = 0
        return state

    def _guarded(self, parts: Sequence[Code], state: State) -> State | None:
        """Follow a condition, in which nothing ends the shell by failing."""
        self._guards += 1
        try:
            return self.run(parts, state)
        finally:
            self._guards -= 1

    def _list(self, code: Code, state: State) -> State | None:
        left, operator, right = code.parts
        before = self._guarded([left], state)
        if before is None or (before.status is not None and bool(before.status) is (operator.type == "&&")):
            return before
        if before.status is not None:
            return self.statement(right, before)
        after = self.statement(right, before.copy())
        if operator.type == "||" and after is None:
            before.status = 0
        return join(after, before, f"it depends on the command before {operator.type} in line {operator.line}")

    def _negated_command(self, code: Code, state: State) -> State | None:
        after = self._guarded(code.parts[1:], state)
        if after and after.status is not None:
            after.status = int(not after.status)
        return after

    def _compound_statement(self, code: Code, state: State) -> State | None:
        if code.text.startswith("(("):
            return self._test_command(code, state)
        return self.run(code.parts[1:-1], state)

    def _test_command(self, code: Code, state: State) -> State | None:
        words = self.words(state, code.place)
        if code.text.startswith("(("):
            found = words.arithmetic(code.text[2:-2])
            state.status = None if found is None else int(not found)
        else:
            state.status = condition(words, code)
        return self.checked(state)

    def _do_group(self, code: Code, state: State) -> State | None:
        return self.run(code.parts[1:-1], state)

    def _subshell(self, code: Code, state: State) -> State | None:
        state.status = self._inside(lambda start: self.run(code.parts[1:-1], start), state.copy())
        return self.checked(state)

    def _pipeline(self, code: Code, state: State) -> State | None:
        parts = [part for part in code.parts if part.node.is_named]
        statuses = [self._inside(partial(self._guarded, [part]), state.copy()) for part in parts]
        state.status = statuses[-1]
        if state.options & {"pipefail", "unclear"}:
            failed = [status for status in statuses if status != 0]
            state.status = failed[-1] if failed and None not in failed else (None if failed else 0)
        return self.checked(state)

    # ---- branches ----

    def _if_statement(self, code: Code, state: State) -> State | None:
        return self._branches(code, code.parts, state)

    def _branches(self, code: Code, parts: Sequence[Code], state: State) -> State | None:
        kinds = [part.type for part in parts]
        then = kinds.index("then")
        end = next((at for at, kind in enumerate(kinds) if kind in ("elif_clause", "else_clause", "fi")), len(parts))
        tested = self._guarded(parts[1:then], state)
        if tested is None:
            return None
        if tested.status == 0:
            return self.run(parts[then + 1 : end], tested)
        rest: State | None = tested.copy() if tested.status is None else tested
        after = self.run(parts[then + 1 : end], tested) if tested.status is None else None
        clause = parts[end] if end < len(parts) and kinds[end] != "fi" else None
        if clause is None:
            assert rest
            rest.status = 0
        elif clause.type == "elif_clause":
            self.deeper(1)
            rest = self._branches(code, [*clause.parts, *parts[end + 1 :]], rest or tested)
            self.deeper(-1)
        else:
            rest = self.run(clause.parts[1:], rest)
        return join(after, rest, f"it depends on the branch in line {code.line}")

    def _case_statement(self, code: Code, state: State) -> State | None:
        words, why = self.words(state, code.place), f"it depends on the case in line {code.line}"
        value = words.joined(code.parts[1].text)
        result, rest = None, state
        for item in (part for part in code.parts if part.type == "case_item"):
            end = next(at for at, part in enumerate(item.parts) if part.type == ")")
            if any(part.type in (";&", ";;&") for part in item.parts):
                raise Unclear("cases that go on with the next are not followed")
            first = 1 if item.parts[0].type == "(" else 0
            patterns = [part.text for part in item.parts[first:end] if part.type != "|"]
            fits = {True if text == "*" else words.fits(value, text) for text in patterns}
            if fits == {False}:
                continue
            taken = rest.copy()
            taken.status = 0
            branch = self.run([part for part in item.parts[end + 1 :] if part.type != ";;"], taken)
            result = join(result, branch, why)
            if True in fits:
                return result
        rest.status = 0
        return join(result, rest, why)

    # ---- loops ----

    def _for_statement(self, code: Code, state: State) -> State | None:
        if code.parts[0].type != "for":
            raise Unclear("select asks")
        name, body = code.parts[1].text, code.parts[-1]
        texts = [part.text for part in code.parts[3:-1] if part.node.is_named]
        expand = self.words(state, code.place)
        words = [word for text in (texts if code.parts[2].type == "in" else ['"$@"']) for word in expand.fields(text)]
        state.status = 0
        if len(words) <= _MOST_ROUNDS and not any(word.why for word in words):
            start, left = state.copy(), False
            current: State | None = state
            for word in words:
                if current is None or left:
                    break
                current.assign(name, word)
                self.loops.append([])
                current = self.statement(body, current)
                left = bool(self.loops.pop())
            if not left:
                return current
            state = start
        why = f"it depends on the loop in line {code.line}"

        def next_word(before: State) -> State:
            before.assign(name, Word(f"${name}", code.place, why))
            return before

        return self._settled(next_word, body, state, why)

    def _while_statement(self, code: Code, state: State) -> State | None:
        why = f"it depends on the loop in line {code.line}"
        return self._settled(lambda start: self._guarded(code.parts[1:-1], start), code.parts[-1], state, why)

    def _c_style_for_statement(self, code: Code, state: State) -> State | None:
        head = code.between(code.node.start_byte, code.parts[-1].node.start_byte)
        why = f"it depends on the loop in line {code.line}"

        def count(before: State) -> State:
            for name, stepped in _SET_IN_HEAD.findall(head):
                before.forget(name or stepped, why)
            return before

        return self._settled(count, code.parts[-1], state, why)

    def _settled(self, test: Callable[[State], State | None], body: Code, state: State, why: str) -> State | None:
        """Follow a loop of an unknown number of rounds, until no round changes what is known before it."""
        for _ in range(_SETTLES):
            tested = test(state.copy())
            self.loops.append([])
            after = self.statement(body, tested.copy()) if tested else None
            merged = state.copy()
            for end in (tested, after, *self.loops.pop()):
                merged = join(merged, end, why, True) or merged
            merged.status = None
            if merged == state:
                return state
            state = merged
        state.lose(why)
        return state

    # ---- redirections ----

    def _redirected_statement(self, code: Code, state: State) -> State | None:
        redirects = [part for part in code.parts if part.type in _REDIRECTS]
        # What stands behind the beginning of a here-document is a part of it in the tree.
        redirects += [inner for part in redirects for inner in part.parts if inner.type in _REDIRECTS]
        body = [part for part in code.parts if part.type not in _REDIRECTS]
        before = state.copy()
        is_sure = [self._redirect(part, state) for part in redirects]
        for part in redirects:
            if part.type != "file_redirect" and body and body[0].type == "command":
                self.calls.fed(body[0], part)
        behind = [child for part in redirects for child in _behind(part)]
        if behind:
            for part in (*body, *behind):
                self._inside(partial(self.run, [part]), state.copy())
            state.status = None
            return state
        after = self.statement(body[0], state) if body else state
        if after is None or all(is_sure):
            return after
        return join(after, before, f"it depends on the file that line {code.line} opens")

    def _redirect(self, part: Code, state: State) -> bool:
        """Note what a redirection writes, and tell whether it can be done in any case."""
        words = self.words(state, part.place)
        if part.type == "heredoc_redirect":
            kinds = {child.type: child for child in part.parts}
            if not re.search(r"""["'\\]""", kinds["heredoc_start"].text):
                words.joined(part.between(*document(kinds["heredoc_start"])), True)
            return True
        name = re.sub(r"^\d*(<<<|&>>|&>|>>|>\||>&|<&|<>|>|<)\s*", "", part.text)
        word = words.joined(name) if not name.startswith((">(", "<(")) else Word("-", part.place)
        if part.type == "herestring_redirect" or word.text == "-":
            return True
        is_input = re.match(r"\d*<(?!>)", part.text) and word.text != "/dev/null"
        if not is_input:
            write(self, word)
        return not (is_input or word.why) and bool(_WRITABLE.fullmatch(word.text))


def _behind(redirect: Code) -> list[Code]:
    """Return the pipeline that a here-document's command is the first part of; the tree has it in the redirection."""
    named = [part for part in redirect.parts if part.node.is_named and redirect.type == "heredoc_redirect"]
    parts = {"heredoc_start", "heredoc_body", "heredoc_end", "file_descriptor", *_REDIRECTS}
    found = [part for part in named if part.type not in parts]
    pipes = [part for part in found if part.type == "pipeline"]
    commands = [part for pipe in pipes for part in pipe.parts if part.node.is_named]
    if found != pipes or any(part.type != "command" for part in commands):
        raise Unclear("what stands behind the beginning of a here-document is not followed")
    return commands
