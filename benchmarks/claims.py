"""How every benchmark starts and ends: its quick form, its claims as lines of JSON, and its results in the README.

python -m benchmarks.NAME            # measure and print
python -m benchmarks.NAME --write    # and replace this benchmark's block in benchmarks/README.md
python -m benchmarks.NAME --quick    # the same code on sizes of seconds, whose figures mean nothing
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

README = Path(__file__).parent / "README.md"

# Lines of Markdown that `--write` puts into the README: tables first, then claims.
_tables: list[str] = []
_claims: list[Sequence[object]] = []


class MissingEnvironment(RuntimeError):
    """A benchmark cannot run here; the text names what it needs."""


def report(claim: str, value: float, goal: float, at_least: bool = False) -> None:
    """Print a claim, its value, the goal and whether it is met.

    Args:
        claim: What was measured.
        value: The result.
        goal: The largest value that is good enough.
        at_least: The goal is the smallest one instead.
    """
    met = value >= goal if at_least else value <= goal
    print(json.dumps({"claim": claim, "value": round(value, 3), "goal": goal, "met": met}))
    _claims.append((claim, f"{value:.4g}", f"{'≥' if at_least else '≤'} {goal:g}", "yes" if met else "**no**"))


def report_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; `--write` puts it into the README."""
    lines = markdown_table(columns, rows)
    print("\n".join(lines))
    _tables.extend([*lines, ""])


def start(main: Callable[[], None], quick: Callable[[], None]) -> None:
    """Run a benchmark's `main`, with `--write` into the README, or with `--quick` its quick form."""
    writes = "--write" in sys.argv[1:]
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--write"]
    try:
        if "--quick" in sys.argv[1:]:
            quick()
            return
        main()
    except MissingEnvironment as missing:
        sys.exit(str(missing))
    if writes:
        name = Path(sys.argv[0]).stem
        README.write_text(with_block(README.read_text(), name, _block(name)))


def with_block(text: str, name: str, block: Sequence[str]) -> str:
    """Return a README whose block of a benchmark is replaced, or appended where there is none.

    Args:
        text: The README.
        name: The benchmark's module.
        block: Lines of Markdown.
    """
    first, last = f"<!-- written by {name}.py -->", f"<!-- end of {name}.py -->"
    written = "\n".join([first, *block, last])
    if first not in text:
        return f"{text.rstrip()}\n\n### `{name}.py`\n\n{written}\n"
    before, rest = text.split(first, 1)
    _, after = rest.split(last, 1)
    return f"{before}{written}{after}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    lines = (f"| {' | '.join(map(str, row))} |" for row in (columns, *rows))
    header, *body = lines
    return [header, f"|{'---|' * len(columns)}", *body]


def _block(name: str) -> list[str]:
    claims = [*markdown_table(("claim", "value", "goal", "met"), _claims), ""] if _claims else []
    command = " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]])
    return ["", f"`{command}`, {_provenance()}:", "", *_tables, *claims]


def _provenance() -> str:
    """Return date, commit, machine and its load, which is mostly that of other work if it exceeds the cores."""
    commit = _git("rev-parse", "--short=8", "HEAD")
    changed = [line for line in _git("status", "--porcelain").splitlines() if not line.endswith("benchmarks/README.md")]
    dirty = " with uncommitted changes" if changed else ""
    cores = len(os.sched_getaffinity(0))
    load = f"load of the last 15 minutes {os.getloadavg()[2]:.0f}"
    return f"{datetime.date.today()}, commit {commit}{dirty}, {cores} cores of {_processor()}, {load}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else "an unnamed processor"


def _git(*words: str) -> str:
    command = ["git", *words]
    return subprocess.run(command, cwd=README.parent, capture_output=True, text=True, check=True).stdout.rstrip()
