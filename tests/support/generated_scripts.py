"""Launch scripts in bash that are made from a seed: ordinary ones, with the constructs that people use in them."""

from __future__ import annotations

import random
from collections.abc import Callable

# How much of a script is what most launch scripts are made of.
_ORDINARY = 0.8
_VALUES = ("1e-6", "5e-5", "0.1", "2", "8", "grpo", "a b", "x-y", "it's", "/data/m.jsonl", "")
_NUMBERS = ("2", "3", "4", "8", "16")
_SCALARS = ("LR", "WD", "NAME", "MODE")
_COUNTS = ("N", "TP", "GPUS")
_LISTS = ("ARGS", "OPT_ARGS", "PERF_ARGS")


class Generator:
    """Makes one script.

    Args:
        seed: The same seed makes the same script.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self._flags = 0
        self._functions = 0

    def script(self) -> str:
        """Return the script."""
        pick = self.random
        lines = ["#!/bin/bash"]
        if pick.random() < 0.2:
            lines.append(pick.choice(("set -e", "set -ex", "set -euo pipefail", "set -x", "set -o pipefail")))
        lines += [f"{name}={self.quoted(pick.choice(_VALUES))}" for name in _SCALARS]
        lines += [f"{name}={pick.choice(_NUMBERS)}" for name in _COUNTS]
        lines += [self.array(name) for name in _LISTS]
        for _ in range(pick.randint(2, 7)):
            lines += self.statement(2)
        lines += self.call()
        if pick.random() < 0.2:
            lines += self.statement(1)
        return "\n".join(lines) + "\n"

    # ---- words ----

    def quoted(self, text: str) -> str:
        """Return a text as one word."""
        forms = [f'"{text}"'] if not set(text) & set('"$`\\') else []
        if "'" not in text:
            forms.append(f"'{text}'")
        if text and not set(text) & set(" '\"$`\\"):
            forms += [text, text]
        return self.random.choice(forms)

    def number(self) -> str:
        """Return an arithmetic expression."""
        pick, name, other = self.random, self.random.choice(_COUNTS), self.random.choice(_COUNTS)
        digit = pick.choice(_NUMBERS)
        return pick.choice((
            f"$(({name} * {digit}))", f"$((${name}+{other}))", f"$(( {name} > {digit} ? {digit} : {name} ))",
            f"$((({name} + {digit}) / 2))", f"$(({name} % {digit}))", f"$(({name} << 1))", f"$(( -{name} + {digit} ))",
            f"$((2**{name}))", f"$(( {name} == {digit} || {other} < 4 ))",
        ))  # fmt: skip

    def word(self) -> str:
        """Return a word with expansions."""
        pick, name = self.random, self.random.choice(_SCALARS)
        text = self.quoted(pick.choice(_VALUES[:8]))
        if pick.random() < _ORDINARY:
            return pick.choice((
                text, text, f'"${name}"', f'"${{{name}}}"', f"${name}", f'"${{{name}:-{pick.choice(_VALUES[:6])}}}"',
                f'"${{NEVER_{name}:-${name}}}"', f'"pre_${{{name}}}_post"', self.number(), f"${pick.choice(_COUNTS)}",
            ))  # fmt: skip
        return pick.choice((
            f'"${{{name}%-*}}"', f'"${{{name}#*-}}"', f'"${{{name}/-/_}}"', f'"${{{name}//a/b}}"', f'"${{{name}:0:3}}"',
            f"${{#{name}}}", f'"${{{name}^^}}"', f'"${{{name}:+set}}"', f"'${name}'", f'"\\${name}"',
            f'"$(echo "${name}")"', f'"${{{pick.choice(_LISTS)}[1]}}"', f"${{#{pick.choice(_LISTS)}[@]}}",
            f'"$(printf \'%s-%s\' "${name}" x)"', f"run_{{a,b}}_{pick.choice(_NUMBERS)}",
            f"$'t\\tx{pick.choice(_NUMBERS)}'",
            f'"$(basename /m/{pick.choice(_NUMBERS)}B)"', '"$(date +%F)"', f'"${{{name}##*/}}"', "a\\ b",
        ))  # fmt: skip

    def flag(self) -> str:
        """Return a flag of a name that no other one has, with a value or without."""
        self._flags += 1
        form = self.random.random()
        if form < 0.1:
            return f"--switch-{self._flags}"
        mark = "=" if form > 0.85 else " "
        return f"--flag-{self._flags}{mark}{self.word()}"

    def flags(self, most: int = 3) -> str:
        """Return a few flags, some of a name that is given elsewhere, too."""
        found = [self.flag() for _ in range(self.random.randint(1, most))]
        if self.random.random() < 0.4:
            found.append(f"--lr {self.word()}")
        return " ".join(found)

    def array(self, name: str) -> str:
        """Return an array of flags."""
        if self.random.random() < 0.5:
            return f"{name}=({self.flags()})"
        rows = [f"   {self.flag()}{self.random.choice(('', '', ' # it is', '  '))}" for _ in range(3)]
        return "\n".join([f"{name}=(", *rows, ")"])

    # ---- statements ----

    def statement(self, depth: int) -> list[str]:
        """Return the lines of a statement."""
        simple = (self.assignment, self.assignment, self.count, self.more_flags, self.more_flags, self.noise)
        nested = (self.branch, self.branch, self.loop, self.function, self.subshell, self.joined)
        if self.random.random() > _ORDINARY:
            others = (self.cases, self.while_loop) if depth else (self.noise, self.count)
            return self.random.choice((self.reading, *others * 4))(depth)
        return self.random.choice((*simple, *(nested if depth else ())))(depth)

    def block(self, depth: int) -> list[str]:
        """Return a few statements, indented."""
        found: list[str] = []
        for _ in range(self.random.randint(1, 2)):
            found += self.statement(depth - 1)
        return found

    def assignment(self, depth: int) -> list[str]:
        """Return an assignment of any form."""
        pick, name, word = self.random, self.random.choice(_SCALARS), self.word()
        return [pick.choice((
            f"{name}={word}", f"{name}={word}", f"export {name}={word}", f"{name}+={word}", f"declare {name}={word}",
            f': "${{{name}:={pick.choice(_VALUES[:6])}}}"', f"{name}=${{{name}:-{pick.choice(_VALUES[:6])}}}",
            f"unset {name}; {name}={word}", f"printf -v {name} '%s' {word}", f"{name}={word} true",
            f"eval {name}={pick.choice(_NUMBERS)}", f"{pick.choice(_LISTS)}[1]={word}", f"true && {name}={word}",
            f"false && {name}={word}", f"false || {name}={word}", f"{name}={word} &\nwait",
            f"read -r {name} <<< {word}",
        ))]  # fmt: skip

    def count(self, depth: int) -> list[str]:
        """Return an assignment of a number."""
        pick, name = self.random, self.random.choice(_COUNTS)
        digit = pick.choice(_NUMBERS)
        return [pick.choice((
            f"{name}={self.number()}", f"(({name}+={digit}))", f"(( {name} = {digit} ))", f"let {name}+={digit}",
            f"{name}=$(({name}+1))", f"(({name}++))", f"declare -i {name}={digit}+1", f"{name}=${{NEVER:-{digit}}}",
        ))]  # fmt: skip

    def more_flags(self, depth: int) -> list[str]:
        """Return a change of a list of flags."""
        pick, name = self.random, self.random.choice(_LISTS)
        return [pick.choice((
            f"{name}+=({self.flags(2)})", f"{name}+=({self.flag()})", f"{name}=({self.flags(2)})",
            f'{name}=("${{{name}[@]}}" {self.flag()})', f"unset {name}; {name}+=({self.flag()})",
            f"{name}+=($(echo {self.flag()}))",
        ))]  # fmt: skip

    def noise(self, depth: int) -> list[str]:
        """Return something that sets nothing."""
        pick = self.random
        return pick.choice((
            ["# don't read this: --lr 9", ":"], ['echo "starting train.py --lr 9"'], ["mkdir -p logs"],
            ["pkill -f train.py"],
            ["python3 convert.py --lr 9"], ["cat > note.txt <<'EOF'", "python3 train.py --lr 9", "it's", "EOF"],
            ["cat <<-END", "\tLR=$LR", "\tEND"], ["sleep 0"], ["ls > /dev/null 2>&1 || true"], ["cp run.sh copy.sh"],
            ['trap "echo done" EXIT'], ['[ -n "$LR" ] && echo "$LR"'], ["export PATH=/opt/bin:$PATH"], [":"],
            ['echo "a (b" | grep -c x > /dev/null || true'], ["wait"], ["ulimit -n 1024 2> /dev/null || true"],
        ))  # fmt: skip

    def reading(self, depth: int) -> list[str]:
        """Return a file that is written and sourced, or read."""
        pick, name = self.random, self.random.choice(_SCALARS)
        return pick.choice((
            ["cat > env.sh <<EOF", f"{name}={pick.choice(_NUMBERS)}", "EOF", "source ./env.sh"],
            [f"echo '{name}={pick.choice(_NUMBERS)}' > set.sh", ". ./set.sh"],
            [f'IFS=, read -r {name} WD <<< "{pick.choice(_NUMBERS)},{pick.choice(_NUMBERS)}"'],
            [f"{name}=$(cat <<EOF", f"${pick.choice(_COUNTS)} x", "EOF", ")"],
            [f"source <(echo {name}={pick.choice(_NUMBERS)})"],
            ["mapfile -t PERF_ARGS < <(printf '%s\\n' --mapped 1)"],
            [f"echo {pick.choice(_NUMBERS)} | read {name} || true"],
        ))  # fmt: skip

    def condition(self) -> str:
        """Return a condition, most of them known."""
        pick, name, count = self.random, self.random.choice(_SCALARS), self.random.choice(_COUNTS)
        digit = pick.choice(_NUMBERS)
        return pick.choice((
            f'[ "${count}" -gt {digit} ]', f"[[ ${name} == *-* ]]", f'[ "${name}" = grpo ]',
            f"(( {count} >= {digit} ))",
            f'[[ -n "${name}" && ${count} -lt {digit} ]]', '[ -z "${NEVER:-}" ]', "true", "false", "! true",
            f'[ -z "${name}" ] || [ ${count} -eq {digit} ]', "[ -d /nonexistent ]", "test -f run.sh",
            f'[[ "${name}" != grpo || ! ${count} -gt {digit} ]]', "grep -q nothing run.sh", f"[ ! {count} = {digit} ]",
        ))  # fmt: skip

    def branch(self, depth: int) -> list[str]:
        """Return an `if`."""
        lines = [f"if {self.condition()}; then", *self.block(depth)]
        if self.random.random() < 0.3:
            lines += [f"elif {self.condition()}", "then", *self.block(depth)]
        if self.random.random() < 0.5:
            lines += ["else", *self.block(depth)]
        return [*lines, "fi" + self.random.choice(("", "", " > /dev/null", "; true"))]

    def loop(self, depth: int) -> list[str]:
        """Return a `for`."""
        pick = self.random
        head = pick.choice((
            "for item in a b c; do", f"for LR in {self.word()} {self.word()}; do", "for ((i=0; i<3; i++)); do",
            'for item in "${ARGS[@]}"; do', "for item in {1..3}; do", "for item in $(seq 1 2); do", "for N in 4 8; do",
        ))  # fmt: skip
        ends = pick.choice(([], [], [f"{self.condition()} && break"], [f"if {self.condition()}; then continue; fi"]))
        last = pick.choice(([], ['ARGS+=(--item "$item")'], ["NAME=$item"]))
        return [head, *ends, *self.block(depth), *last, "done"]

    def while_loop(self, depth: int) -> list[str]:
        """Return a `while` that ends."""
        self._functions += 1
        count = f"I{self._functions}"
        return self.random.choice((
            [f"{count}=0", f"while [ ${count} -lt 2 ]; do", f"{count}=$(({count} + 1))", *self.block(depth), "done"],
            [f"{count}=3", f"until (( {count} == 0 )); do", f"(({count}--)) || true", *self.block(depth), "done"],
            ["while read -r line; do", *self.block(depth), "NAME=$line", "done < <(printf '%s\\n' x y)"],
            ["printf '%s\\n' 1 2 | while read -r line; do", *self.block(depth), "done"],
        ))  # fmt: skip

    def cases(self, depth: int) -> list[str]:
        """Return a `case`."""
        name = self.random.choice(_SCALARS)
        return [
            f'case "${name}" in',
            "  grpo|ppo)", *self.block(depth), "  ;;", "  (*-[a-z0-9]*)", *self.block(depth), "  ;;",
            *self.random.choice(([], ["  *)", *self.block(depth), "  ;;"])), "esac",
        ]  # fmt: skip

    def function(self, depth: int) -> list[str]:
        """Return a function and its call."""
        self._functions += 1
        name, pick = f"setup_{self._functions}", self.random
        body = [
            *pick.choice(([], ["local LR=7"], ['local first="$1"', "shift"], ['NAME="$1"'], ["local -a ARGS=(--l 1)"]))
        ]
        body += [*self.block(depth), *pick.choice(([], ["return"], [f"{self.condition()} && return 0"], ["true"]))]
        call = pick.choice((name, f"{name} {self.word()} b", f'{name} "$LR" "$N"', f"{name} a || true"))
        return [pick.choice((f"{name}() {{", f"function {name} {{")), *body, "WD=9", "}", call]

    def subshell(self, depth: int) -> list[str]:
        """Return commands in a shell of their own, or in braces."""
        opens, closes = self.random.choice((("(", ")"), ("{", "}"), ("true && {", "}"), ("false || (", ")")))
        return [opens, *self.block(depth), closes]

    def joined(self, depth: int) -> list[str]:
        """Return commands joined by operators."""
        lists: tuple[Callable[[int], list[str]], ...] = (self.assignment, self.count, self.more_flags)
        body = self.random.choice(lists)(depth)[0]
        if "\n" in body or ";" in body:
            return [body]
        return [f"{self.condition()} {self.random.choice(('&&', '||', '&& true &&'))}", f"  {body}"]

    def call(self) -> list[str]:
        """Return the training's start."""
        pick = self.random
        lists = " ".join(pick.choice(('"${%s[@]}"', "${%s[@]}")) % name for name in _LISTS)
        flags = f"{lists} {self.flags()}"
        return pick.choice((
            [f"python3 train.py {flags}"], [f"python3 train.py {flags}"], [f"python3 -u ./train.py \\\n   {flags}"],
            [f"python3 train.py {flags} 2>&1 | tee log.txt"],
            [f"nohup python3 train.py {flags} > log.txt 2>&1 &", "wait"],
            [f"CMD=(python3 train.py {flags})", 'echo "${CMD[@]}"', '"${CMD[@]}"'],
            [f"env A=1 python3 train_async.py {flags}"],
            ["launch() {", f'  python3 train.py {lists} "$@"', "}", f"launch {self.flags()}"],
            [f"exec python3 train.py {flags}"],
            [f"if true; then python3 train.py {flags}; fi"], [f"mkdir -p out && python3 train.py {flags}"],
            [f"LR=3 python3 train.py {flags}"], [f"time python3 train.py {flags}"],
            [f"(cd . && python3 train.py {flags})"],
        ))  # fmt: skip


def script_of(seed: int) -> str:
    """Return the script of a seed."""
    return Generator(seed).script()
