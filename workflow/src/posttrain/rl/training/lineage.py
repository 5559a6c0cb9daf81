"""A run's parent: checked when the workflow is planned, recorded in the fork's receipt.

A fork starts with another run's weights, optimizer state and number of finished steps, and continues under its own
experiment. Model and trainer precision must be the parent's, because the state depends on them. Everything else may
differ; differences are recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config.fields import did_you_mean, leaves_of
from posttrain.config.legacy_runs import refuse_other_experiment
from posttrain.config.load import read_yaml
from posttrain.errors import Problem, raise_if_any
from posttrain.rl.training.checkpoints import check_sizes, committed_checkpoints
from posttrain.store import Paths, read_receipt

STEP = "fork_checkpoint"
PRECISION = "trainer.params_dtype"


def parent_of(paths: Paths) -> tuple[Paths, int]:
    """Return the folder of a fork's parent, and the parent's step after which the fork starts."""
    name, _, step = paths.resolved.fork.partition("@")
    return Paths(dataclasses.replace(paths.resolved, run=name, fork="")), int(step)


def read_lineage(receipt: Path) -> list[dict[str, Any]]:
    """Return a run's ancestors, oldest first, each with "run", "step" and "changed"; empty without a receipt.

    Args:
        receipt: The fork's, `Paths.fork_receipt`.
    """
    return list(read_receipt(receipt).settings["lineage"]) if receipt.exists() else []


def changed_values(paths: Paths) -> dict[str, list[Any]]:
    """Return experiment key -> (parent's value, fork's value) for the keys that differ."""
    parent, _ = parent_of(paths)
    old, new = leaves_of(read_yaml(parent.experiment)), leaves_of(paths.resolved.experiment)
    return {key: [old.get(key), new.get(key)] for key in sorted(old | new) if old.get(key) != new.get(key)}


def check_fork(paths: Paths) -> list[Problem]:
    """Return the problems of the fork that a configuration requests, if any."""
    if not paths.resolved.fork:
        return []
    if paths.fork_receipt.exists():
        return list(_other_parent(paths))
    parent, _ = parent_of(paths)
    # The second of a run's two config files.
    if not parent.config.exists():
        return [_no_such_run(paths, parent)]
    return [*_begun_otherwise(paths), *_bad_checkpoint(paths), *_unlike_parent(paths)]


def refuse_other_run(paths: Paths) -> None:
    """Raise `ConfigError` if a run of this name started with another experiment, or cannot be forked as requested."""
    if paths.train.exists():
        refuse_other_experiment(paths.experiment, paths.resolved)
    raise_if_any(check_fork(paths))


def _other_parent(paths: Paths) -> Iterator[Problem]:
    """Yield a problem if a started fork names another parent; its own parent need not exist any more."""
    last = read_lineage(paths.fork_receipt)[-1]
    begun = f"{last['run']}@{last['step']}"
    if begun != paths.resolved.fork:
        remedy = "give that one, or another name with --config run=..."
        allowed = f"{begun}, from which {paths.run.name} was forked"
        yield Problem("fork-of-another-run", "fork", paths.resolved.fork, allowed, remedy)


def _no_such_run(paths: Paths, parent: Paths) -> Problem:
    results = parent.run.parent
    known = sorted(path.parent.name for path in results.glob(f"*/{parent.config.name}"))
    remedy = did_you_mean(parent.run.name, known) or "`snakemake status --cores 1` shows all runs"
    return Problem(
        "no-such-run", "fork", paths.resolved.fork, ", ".join(known) or f"a run in {results}, which has none", remedy
    )


def _begun_otherwise(paths: Paths) -> Iterator[Problem]:
    _, step = parent_of(paths)
    own = [finished for finished, _ in committed_checkpoints(paths.checkpoints) if finished != step]
    if own:
        allowed = f"a run that has not begun; {paths.run.name} has checkpoints of its own (step {own[-1]})"
        remedy = "give another name with --config run=..., or leave fork= out"
        yield Problem("fork-has-begun", "fork", paths.resolved.fork, allowed, remedy)


def _bad_checkpoint(paths: Paths) -> Iterator[Problem]:
    parent, step = parent_of(paths)
    committed = dict(committed_checkpoints(parent.checkpoints))
    if step not in committed:
        steps = ", ".join(map(str, committed)) or "none yet"
        remedy = "choose one of these steps; trainer.keep_checkpoints decides how many are kept"
        allowed = f"a step whose checkpoint {parent.run.name} has: {steps}"
        yield Problem("no-such-step", "fork", paths.resolved.fork, allowed, remedy)
    elif found := check_sizes(committed[step]):
        remedy = f"take another step: {'; '.join(found)}"
        yield Problem("checkpoint-damaged", "fork", paths.resolved.fork, "a whole checkpoint", remedy)


def _unlike_parent(paths: Paths) -> Iterator[Problem]:
    parent, step = parent_of(paths)
    for key, (old, new) in changed_values(paths).items():
        if key.startswith("model."):
            remedy = "a fork has its parent's model"
            yield Problem("fork-changes-model", key, repr(new), f"{old!r}, as in {parent.run.name}", remedy)
    precision = paths.resolved.config.trainer.params_dtype
    old = leaves_of(read_yaml(parent.config)).get(PRECISION)
    if old != precision:
        remedy = f"set='{PRECISION}={old}'"
        yield Problem("fork-changes-precision", PRECISION, precision, f"{old}, as in {parent.run.name}", remedy)
    num_steps = paths.resolved.config.training.num_steps
    if num_steps <= step:
        remedy = "they are counted from the first"
        yield Problem("fork-has-ended", "training.num_steps", str(num_steps), f"more than {step}", remedy)
