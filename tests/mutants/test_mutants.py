"""Edits of the modules that decide: the unit tests notice them (`make test-faults PART=mutants`)."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.mutants.operators import mutants_of
from tests.mutants.runner import file_of
from tests.mutants.targets import TARGETS
from tests.support.workflow_runs import ROOT

SOURCE = '''"""A text."""
def near(values: list[int], limit=3):
    """Another."""
    if len(values) >= limit and not values[0]:
        raise ValueError("far")
    values.insert(limit, -1)
    return min(values), max(2 * limit, 0.5)
'''


def test_what_an_edit_may_be() -> None:
    """By hand: what each line's mutants are, by kind."""
    edits = {(m.line, m.kind, m.before, m.after) for m in mutants_of(SOURCE)}
    assert edits == {
        (2, "off by one", "3", "(4)"),
        (4, "condition", "len(values) >= limit and not values[0]", "(not (len(values) >= limit and (not values[0])))"),
        (4, "condition", "len(values) >= limit and not values[0]", "(len(values) >= limit or not values[0])"),
        (4, "comparison", "len(values) >= limit", "(len(values) > limit)"),
        (4, "comparison", "len(values) >= limit", "(len(values) < limit)"),
        (4, "condition", "not values[0]", "(values[0])"),
        (4, "off by one", "0", "(1)"),
        (5, "dropped", 'raise ValueError("far")', "pass"),
        (6, "dropped", "values.insert(limit, -1)", "pass"),
        (6, "swapped", "values.insert(limit, -1)", "(values.insert(-1, limit))"),
        (6, "sign", "-1", "(1)"),
        (6, "off by one", "1", "(2)"),
        (7, "dropped", "return min(values), max(2 * limit, 0.5)", "return None"),
        (7, "min/max", "min(values)", "(max(values))"),
        (7, "min/max", "max(2 * limit, 0.5)", "(min(2 * limit, 0.5))"),
        (7, "sign", "2 * limit", "(2 / limit)"),
        (7, "off by one", "2", "(3)"),
        (7, "constant", "0.5", "(2.0)"),
    }


def test_an_edit_changes_its_place_and_nothing_else() -> None:
    for mutant in mutants_of(SOURCE):
        edited = mutant.apply(SOURCE)
        assert edited != SOURCE
        assert edited[: mutant.start] == SOURCE[: mutant.start]
        assert edited.endswith(SOURCE[mutant.start + len(mutant.before) :])
        compile(edited, "mutant", "exec")


def test_targets_and_their_tests_are_there() -> None:
    tests = {test.partition("::")[0] for named in TARGETS.values() for test in named}
    assert not [path for path in sorted(tests) if not (ROOT / path).exists()]
    assert not [module for module in TARGETS if not file_of(module).exists()]


@pytest.mark.faults("mutants")
@pytest.mark.timeout(3600)
def test_mutants_are_noticed() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.mutants"], cwd=ROOT, check=False)
    assert done.returncode == 0
