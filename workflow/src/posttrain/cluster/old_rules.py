"""Rejects rule names of the previous version with the new name; Snakemake would take the old ones for files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from posttrain.errors import Problem
from posttrain.store.format_versions import CURRENT_RULES


def find_old_rules(words: Sequence[str], resources: Any) -> list[Problem]:
    """Return a problem for each old name on the command line, or in a profile's threads and resources.

    Args:
        words: Words of the command line.
        resources: `workflow.resource_settings`.
    """
    named = [word.replace("=", ":").partition(":")[0] for word in words]
    return [*_problems([*named, *resources.overwrite_threads, *resources.overwrite_resources])]


def find_old_rules_of_dag(dag: Any) -> list[Problem]:
    """Return a problem for each old name in a profile's `--until`, `--omit-from` or `--forcerun`.

    Args:
        dag: `workflow.dag_settings`, which Snakemake sets once it has read the Snakefile.
    """
    return [*_problems([*dag.until, *dag.omit_from, *dag.forcerun])]


def _problems(names: Iterable[str]) -> Iterator[Problem]:
    for old in sorted(CURRENT_RULES.keys() & set(names)):
        new = CURRENT_RULES[old]
        yield Problem(
            "renamed-rule", "rule", old, new, f"write {new} on the command line and in profiles; the rule was renamed"
        )
