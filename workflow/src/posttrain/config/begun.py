"""A run that has begun keeps its experiment.

A run's default name is made from its experiment, so another experiment is another run. A name that the user gave says
nothing about the experiment: going on under it with other values would mix two experiments in one result.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.config.load import Resolved, leaves_of, read_yaml
from posttrain.errors import Problem, raise_if_any

STEPS = "training.num_steps"


def refuse_other_experiment(begun: Path, resolved: Resolved) -> None:
    """Compare the experiment with the one that a run of this name has begun.

    Args:
        begun: The run's `experiment.yaml`; nothing is compared when it does not exist.
        resolved: What is asked for now.

    Raises:
        ConfigError: With every value that differs.
    """
    if not begun.exists():
        return
    old, new = leaves_of(read_yaml(begun)), leaves_of(resolved.experiment)
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    remedy = f"give the old value, give another name with --config run=..., or delete {begun.parent}"
    if changed == [STEPS] and new[STEPS] > old[STEPS]:
        # Its state after the last step is where more steps begin.
        remedy = (
            f"go on in a run of another name: --config run=... fork={resolved.run}@{old[STEPS]}, or give the old value"
        )
    raise_if_any(
        [
            Problem(key, repr(new.get(key)), f"{old.get(key)!r}, with which the run {resolved.run} began", remedy)
            for key in changed
        ]
    )
