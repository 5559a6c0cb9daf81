"""Compound commands of bash: branches, loops, pipelines, subshells and redirections."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.foreign.script import MOST_WORDS, Word
from posttrain.foreign.shell_patterns import matches
from posttrain.foreign.shell_state import State, join
from posttrain.foreign.shell_tree import Code, Unclear, document
from posttrain.foreign.shell_words import Words

# Rounds of a loop whose condition is known; after that it is taken as one that is not.
_MOST_ROUNDS = 200
# Rounds after which what a loop changes does not change any more.
_SETTLES = 8
_REDIRECTS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
# Files that can be written in any case.
_WRITABLE = re.compile(r"/dev/(null|stdout|stderr|tty)|[012-]|[\w.-]+")


@dataclass
class Loop:
    """The states in which a loop's body was left early."""

    breaks: list[State] = field(default_factory=list)
    continues: list[State] = field(default_factory=list)


class Flow:
    """What `Shell` does with compound commands."""

    loops: list[Loop]
    statement: Callable[..., State | None]
    run: Callable[..., State | None]
    inside: Callable[..., State | None]
    guarded: Callable[..., State | None]
    checked: Callable[..., State | None]
    assign: Callable[..., None]
    budget: Any
    words: Callable[[State, str], Words]
    output_of: Callable[[State, str, str], str | None]
    _guards: int

    def _list(self, code: Code, state: State) -> State | None:
        left, operator, right = code.parts
        before = self.guarded([left], state)
        if before is None or (before.status is not None and bool(before.status) is (operator.type == "&&")):
            return before
        if before.status is not None:
            return self.statement(right, before)
        after = self.statement(right, before.copy())
        if (operator.type == "||") and after is None:
            before.status = 0
        return join(after, before, f"it depends on the command before {operator.type} in line {operator.line}")

    def _negated_command(self, code: Code, state: State) -> State | None:
        after = self.guarded(code.parts[1:], state)
        if after and after.status is not None:
            after.status = int(not after.status)
        return after

    def _compound_statement(self, code: Code, state: State) -> State | None:
        if code.text.startswith("(("):
            return self._arithmetic_command(code, state)
        return self.run(code.parts[1:-1], state)

    def _arithmetic_command(self, code: Code, state: State) -> State | None:
        found = self.words(state, code.place).arithmetic(code.text[2:-2])
        state.status = None if found is None else int(not found)
        return self.checked(state)

    def _do_group(self, code: Code, state: State) -> State | None:
        return self.run(code.parts[1:-1], state)

    def _subshell(self, code: Code, state: State) -> State | None:
        inner = self.inside(lambda start: self.run(code.parts[1:-1], start), state.copy())
        return self._after(state, inner)

    def _after(self, state: State, inner: State | None) -> State | None:
        """Return to the shell after one that was started in it."""
        state.status = inner.status if inner else None
        state.output = inner.output if inner else None
        state.stdin = inner.stdin if inner else None
        state.files = inner.files if inner else {}
        return self.checked(state)

    def _pipeline(self, code: Code, state: State) -> State | None:
        if "lastpipe" in state.options:
            raise Unclear("lastpipe is not followed")
        statuses: list[int | None] = []
        files = state.files
        text: str | None = ""
        parts = [part for part in code.parts if part.node.is_named]
        for number, part in enumerate(parts):
            inner = state.copy()
            inner.files = dict(files)
            if number:
                inner.stdin = lines_of(text)
            inner.output = ""
            self._guards += 1
            found = self.inside(lambda start, part=part: self.statement(part, start), inner)
            self._guards -= 1
            text, files = (found.output, found.files) if found else (None, dict.fromkeys(files))
            statuses.append(found.status if found else None)
        state.write(text)
        state.files, state.stdin = files, None
        state.status = statuses[-1]
        if "pipefail" in state.options or "unclear" in state.options:
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
        tested = self.guarded(parts[1:then], state)
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
            rest = self._branches(code, [*clause.parts, *parts[end + 1 :]], rest or tested)
        else:
            rest = self.run(clause.parts[1:], rest)
        return join(after, rest, f"it depends on the branch in line {code.line}")

    def _case_statement(self, code: Code, state: State) -> State | None:
        expand = self.words(state, code.place)
        value = expand.joined(code.parts[1].text)
        result, rest = None, state
        for item in (part for part in code.parts if part.type == "case_item"):
            end = next(at for at, part in enumerate(item.parts) if part.type == ")")
            if any(part.type in (";&", ";;&") for part in item.parts):
                raise Unclear("cases that go on with the next are not followed")
            first = 1 if item.parts[0].type == "(" else 0
            fits = [self._fits(expand, part.text, value) for part in item.parts[first:end] if part.type != "|"]
            if not any(fit is not False for fit in fits):
                continue
            is_sure = next((fit for fit in fits if fit is not False), None) is True
            taken = rest if is_sure else rest.copy()
            taken.status = 0
            branch = self.run([part for part in item.parts[end + 1 :] if part.type != ";;"], taken)
            result = join(result, branch, f"it depends on the case in line {code.line}")
            if is_sure:
                return result
        rest.status = 0
        return join(result, rest, f"it depends on the case in line {code.line}")

    def _fits(self, expand: Words, text: str, value: Word) -> bool | None:
        if text == "*":
            return True
        pattern = expand.pattern(text)
        if value.why or pattern is None or not value.text.isascii():
            return None
        self.budget.spend(len(value.text) * len(text))
        return matches(pattern, value.text)

    # ---- loops ----

    def _for_statement(self, code: Code, state: State) -> State | None:
        if code.parts[0].type != "for":
            raise Unclear("select asks")
        name, body = code.parts[1].text, code.parts[-1]
        expand = self.words(state, code.place)
        texts = [part.text for part in code.parts[3:-1] if part.node.is_named]
        if code.parts[2].type != "in":
            texts = ['"$@"']
        words = [word for text in texts for word in expand.fields(text)]
        state.status = 0
        if len(words) > _MOST_ROUNDS or any(word.is_list for word in words) or "?" in state.get(name).attributes:
            why = f"it depends on the loop in line {code.line}"

            def next_word(start: State) -> State:
                self.assign(start, name, Word(f"${name}", code.place, why))
                start.status = None
                return start

            return self._until_settled(next_word, lambda after: after, body, state, why)
        left: State | None = None
        current: State | None = state
        for word in words[:MOST_WORDS]:
            if current is None:
                break
            self.assign(current, name, word)
            current, broken = self._round(body, current)
            left = join(left, broken, f"it depends on a break in the loop of line {code.line}")
        return join(current, left, f"it depends on a break in the loop of line {code.line}")

    def _while_statement(self, code: Code, state: State) -> State | None:
        ends_with = 0 if code.parts[0].type == "until" else 1

        def test(start: State) -> State | None:
            tested = self.guarded(code.parts[1:-1], start)
            if tested and tested.status is not None and ends_with == 0:
                tested.status = int(not tested.status)
            return tested

        return self._loop(test, lambda after: after, code, state)

    def _c_style_for_statement(self, code: Code, state: State) -> State | None:
        if "((" not in code.text:
            raise Unclear("the loop is not followed")
        place = next(at for at, part in enumerate(code.parts) if part.type == "))")
        head = code.between(code.parts[1].node.end_byte, code.parts[place].node.start_byte)
        first, test_text, step = [*head.split(";"), "", ""][:3]

        def compute(text: str) -> Callable[[State | None], State | None]:
            def follow(at: State | None) -> State | None:
                if at:
                    found = self.words(at, code.place).arithmetic(text) if text.strip() else 1
                    at.status = None if found is None else int(not found)
                return at

            return follow

        start = compute(first)(state)
        assert start
        return self._loop(compute(test_text), compute(step), code, start)

    def _loop(
        self,
        test: Callable[[State], State | None],
        step: Callable[[State | None], State | None],
        code: Code,
        state: State,
    ) -> State | None:
        left: State | None = None
        current: State | None = state
        why = f"it depends on the loop in line {code.line}"
        ran = False
        for _ in range(_MOST_ROUNDS):
            before = current.copy() if current else None
            tested = test(current) if current else None
            if tested is None:
                return left
            if tested.status is None:
                assert before
                return join(left, self._until_settled(test, step, code.parts[-1], before, why), why)
            if tested.status:
                tested.status = tested.status if not ran else 0
                tested.status = None if ran else 0
                return join(left, tested, why)
            ran = True
            current, broken = self._round(code.parts[-1], tested)
            current = step(current)
            left = join(left, broken, why)
        return join(left, self._until_settled(test, step, code.parts[-1], current, why) if current else None, why)

    def _until_settled(
        self,
        test: Callable[[State], State | None],
        step: Callable[[State | None], State | None],
        body: Code,
        state: State,
        why: str,
    ) -> State | None:
        """Follow a loop of an unknown number of rounds, until no round changes what is known before it."""
        left: State | None = None
        for _ in range(_SETTLES):
            tested = test(state.copy())
            if tested is None:
                return left
            if tested.status != 0:
                left = join(left, tested.copy(), why, True)
            after, broken = self._round(body, tested) if tested.status in (0, None) else (None, None)
            after = step(after)
            left = join(left, broken, why, True)
            merged = join(state.copy(), after, why, True)
            if merged is None or merged == state:
                break
            state = merged
        else:
            state.lose(why)
            return state
        if left:
            left.status = None
        return left

    def _round(self, body: Code, state: State) -> tuple[State | None, State | None]:
        """Follow a loop's body once, and return what holds after it and where it was left."""
        self.loops.append(Loop())
        result = self.statement(body, state)
        loop = self.loops.pop()
        broken: State | None = None
        for early in loop.continues:
            result = join(result, early, f"it depends on a continue in the loop of line {body.line}", True)
        for early in loop.breaks:
            broken = join(broken, early, f"it depends on a break in the loop of line {body.line}", True)
        return result, broken

    # ---- redirections ----

    def _redirected_statement(self, code: Code, state: State) -> State | None:
        redirects = [part for part in code.parts if part.type in _REDIRECTS]
        # What stands behind the beginning of a here-document is a part of it in the tree.
        redirects += [inner for part in redirects for inner in part.parts if inner.type in _REDIRECTS]
        body = [part for part in code.parts if part.type not in _REDIRECTS]
        before, stdin, output = state.copy(), state.stdin, state.output
        expand = self.words(state, code.place)
        is_sure, target, takes_output, more = True, "", False, []
        for part in redirects:
            text = part.text
            if part.type == "heredoc_redirect":
                state.stdin, rest = self._heredoc(part, state)
                more += rest
            elif part.type == "herestring_redirect":
                state.stdin = self.herestring(part, state)
            elif re.match(r"0?<(?![&(<])", text):
                state.stdin = self._input(text, part, state)
                is_sure = is_sure and ("<(" in text or state.stdin is not None)
            else:
                name = re.sub(r"^\d*(&>>|&>|>>|>\||>&|<&|>|<)\s*", "", text)
                word = expand.joined(name) if ">(" not in text else None
                is_sure = is_sure and (word is None or bool(_WRITABLE.fullmatch(word.text) and not word.why))
                if re.match(r"(1?>|&>)(?!&[12]\b)|1?>&2", text) and not re.match(r"1?>&1", text):
                    takes_output, target = True, os.path.normpath(word.text) if word and not word.why else ""
                elif not re.match(r"2>", text):
                    state.output = None
        if body and body[0].type in ("list", "pipeline"):
            # The redirection belongs to the last command alone.
            state.stdin = None
            takes_output, target = False, ""
            state.output = None
        if takes_output:
            state.output = ""
        after = self.statement(body[0], state) if body else state
        if after is None:
            return None
        written = after.output
        if takes_output:
            after.output = output if (body[0].text if body else "")[:4] != "exec" else None
            if target and not re.match(r"/dev/|[012-]$", target):
                is_more = any(re.match(r"&?\d?>>", part.text) for part in redirects)
                before_it = after.files.get(target) if is_more else ""
                after.files[target] = None if before_it is None or written is None else before_it + written
        after.stdin = stdin
        for part in more:
            inner = self.inside(lambda start, part=part: self.statement(part, start), after.copy())
            changed = self.statement(part, after.copy())
            del inner
            after = join(after, changed, f"it depends on the command in line {part.line}") or after
            after.status = None
        if not is_sure:
            after = join(after, before, f"whether line {code.line} can open its file is not known")
        return after

    def _heredoc(self, part: Code, state: State) -> tuple[tuple[str, ...] | None, list[Code]]:
        """Return the lines of a here-document, and the commands that stand behind its beginning."""
        kinds = {child.type: child for child in part.parts}
        start = kinds["heredoc_start"].text
        text = part.between(*document(kinds["heredoc_start"]))
        if "<<-" in kinds:
            text = re.sub(r"^\t+", "", text, flags=re.MULTILINE)
        rest = [child for child in part.parts if child.type not in ("heredoc_start", "heredoc_body", "heredoc_end")]
        rest = [child for child in rest if child.node.is_named and child.type not in ("file_descriptor", *_REDIRECTS)]
        if any(child.type in ("word", "string", "concatenation") for child in rest):
            raise Unclear("what stands behind the beginning of a here-document is not followed")
        if not re.search(r"""["'\\]""", start):
            word = self.words(state, part.place).joined(text, True)
            if word.why:
                return None, rest
            text = word.text
        return lines_of(text), rest

    def herestring(self, part: Code, state: State) -> tuple[str, ...] | None:
        """Return the lines that `<<<` gives."""
        word = self.words(state, part.place).joined(re.sub(r"^\d*<<<\s*", "", part.text))
        return None if word.why else lines_of(f"{word.text}\n")

    def _input(self, text: str, part: Code, state: State) -> tuple[str, ...] | None:
        match = re.fullmatch(r"0?<\s*<\((.*)\)", text, re.DOTALL)
        if match is None:
            name = self.words(state, part.place).joined(re.sub(r"^0?<\s*", "", text))
            found = None if name.why else state.files.get(os.path.normpath(name.text))
            return None if found is None else lines_of(found)
        return lines_of(self.output_of(state.copy(), match[1], part.place))


def lines_of(text: str | None) -> tuple[str, ...] | None:
    """Return the lines of a text, each with its end."""
    return None if text is None else tuple(re.findall(r"[^\n]*\n|[^\n]+", text))
