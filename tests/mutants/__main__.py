"""Makes every mutant of the modules that decide, and lets the unit tests find them: `make test-faults PART=mutants`.

A mutant is killed when a test fails; one that no test notices has to be argued in `survivors.json`. A count that was
interrupted goes on where it stopped: what is known of a mutant holds until its module or a test of it changes.

    python -m tests.mutants                  # all of it: results in .test-results/mutants.json
    python -m tests.mutants store/lease  # some modules
    python -m tests.mutants --all            # every mutant, not a sample of each module's
    python -m tests.mutants --show KEY       # one mutant as a diff, and what the tests say of it
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from rich.console import Console
from rich.table import Table
from tests.mutants.operators import Mutant, lines_of, mutants_of
from tests.mutants.runner import TIMEOUT_SECONDS, MutantRunner, file_of, fingerprint
from tests.mutants.targets import FUNCTIONS, TARGETS
from tests.support.workflow_runs import ROOT

from posttrain.report.progress import ProgressBar

RESULTS = ROOT / ".test-results" / "mutants.json"
SURVIVORS = Path(__file__).with_name("survivors.json")
# So many of all mutants have to be found.
GOAL = 0.95
NUM_WORKERS = 2
# Of a module with more of them a sample is tried, so that all modules together take less than an hour.
MOST_PER_MODULE = 30


def main() -> int:
    """Try the mutants that nothing is known of yet, show the table, and return 1 where the goal is missed."""
    args = parse_arguments()
    if args.show:
        return show(args.show)
    modules = [name for name in TARGETS if not args.modules or name in args.modules]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    most = sys.maxsize if args.all else MOST_PER_MODULE
    work = [(module, mutant) for module in modules for mutant in sample(mutants_in(module), module, most)]
    fresh = {module: fingerprint(module) for module in modules}
    left = [
        (module, mutant)
        for module, mutant in work
        if known.get(row_name(module, mutant), {}).get("fingerprint") != fresh[module]
    ]
    with ProgressBar("mutants", len(left), "mutants") as bar, ThreadPoolExecutor(NUM_WORKERS) as pool:
        runners = [MutantRunner() for _ in range(NUM_WORKERS)]
        free, one_at_a_time = list(runners), Lock()
        for module in {TARGETS[module]: module for module, _ in left}.values():  # one of those with the same tests
            began = time.monotonic()
            if runners[0].run(module) != 0:
                sys.exit(f"{module}: its tests fail without a mutant, too\n{runners[0].output()[-3000:]}")
            if time.monotonic() - began > TIMEOUT_SECONDS / 2:
                sys.exit(f"{module}: its tests take so long that a slow machine would count as a kill")

        def judge(item: tuple[str, Mutant]) -> None:
            module, mutant = item
            runner = free.pop()
            began = time.monotonic()
            try:
                end = runner.try_mutant(module, mutant)
            finally:
                free.append(runner)
            row = {"end": end, "seconds": round(time.monotonic() - began, 1), "fingerprint": fresh[module]}
            with one_at_a_time:
                known[row_name(module, mutant)] = row
                save(known)
            bar.advance(note=f"{module}:{mutant.line} {end}")

        try:
            for done in [pool.submit(judge, item) for item in left]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)
            for runner in runners:
                runner.close()
    return report(work, known)


def mutants_in(module: str) -> list[Mutant]:
    """Return a module's mutants."""
    source = file_of(module).read_text()
    lines = lines_of(source, FUNCTIONS[module]) if module in FUNCTIONS else None
    return [mutant for mutant in mutants_of(source) if lines is None or mutant.line in lines]


def sample(mutants: Sequence[Mutant], module: str, most: int) -> list[Mutant]:
    """Return at most so many of a module's mutants, the same ones as long as their lines stay."""
    # Names are hashes, so the first ones in their order are a random choice.
    chosen = sorted(mutants, key=lambda mutant: row_name(module, mutant))[:most]
    return [mutant for mutant in mutants if mutant in chosen]


def row_name(module: str, mutant: Mutant) -> str:
    """Return how a mutant is called in the results: it stays when lines above it come and go."""
    return f"{module}:{mutant.key(file_of(module).read_text())}"


def save(known: dict[str, dict]) -> None:
    """Write the results so far: a kill costs the mutants that run."""
    RESULTS.parent.mkdir(exist_ok=True)
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    temporary.replace(RESULTS)


def report(work: Sequence[tuple[str, Mutant]], known: dict[str, dict]) -> int:
    """Print kills by module and kind and every survivor; return 1 when too many live, or one is not argued."""
    argued = json.loads(SURVIVORS.read_text())
    table = Table("module", "mutants", "killed", "living", "share", show_edge=False, header_style="bold")
    kinds, living, total = Counter[str](), [], 0
    for module in dict.fromkeys(module for module, _ in work):
        rows = [(mutant, known[row_name(module, mutant)]["end"]) for name, mutant in work if name == module]
        alive = [(module, mutant) for mutant, end in rows if end == "survived"]
        living += alive
        total += len(rows)
        kinds.update(mutant.kind for mutant, end in rows if end != "survived")
        killed = len(rows) - len(alive)
        table.add_row(module, str(len(rows)), str(killed), str(len(alive)), f"{killed / max(len(rows), 1):.1%}")
    console = Console(width=120)
    console.print(table)
    share = 1 - len(living) / max(total, 1)
    console.print(f"{total - len(living)} of {total} killed ({share:.1%}): {dict(kinds)}", highlight=False)
    unargued = [item for item in living if row_name(*item) not in argued]
    for module, mutant in living:
        why = argued.get(row_name(module, mutant), "NOT ARGUED")
        before, after = (" ".join(text.split())[:60] for text in (mutant.before, mutant.after))
        print(f"{row_name(module, mutant)} line {mutant.line} {mutant.kind}: {before}  ->  {after}\n    {why}")
    return int(share < GOAL or bool(unargued))


def show(name: str) -> int:
    """Print one mutant as a diff, with the end of what the tests say."""
    module = name.partition(":")[0]
    source = file_of(module).read_text()
    (mutant,) = [mutant for mutant in mutants_in(module) if row_name(module, mutant) == name]
    lines = (text.splitlines(keepends=True) for text in (source, mutant.apply(source)))
    sys.stdout.writelines(difflib.unified_diff(*lines, f"{module}.py", "mutant", n=2))
    runner = MutantRunner()
    print(runner.try_mutant(module, mutant))
    print(runner.output()[-3000:])
    runner.close()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="such as store/lease; by default all")
    parser.add_argument("--all", action="store_true", help="try every mutant, not a sample")
    parser.add_argument("--show", help="a mutant's name, as in the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
